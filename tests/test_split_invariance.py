"""Loss and gradients don't depend on how rows were split over ranks and micro-batches, in any of verl's loss modes.

The oracle is verl's own ``ppo_loss`` on all rows at once, over the log-probs and entropies of the plain model on one
unpadded row at a time.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from test_engine import build_engine, full_gradients, ppo_loss_function
from tiny import gradients, jagged, per_row, tiny_model, tokens, verl_batch, worst_gradient

TOLERANCE = 2e-5
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
METRICS = ("actor/pg_loss", "actor/entropy_loss", "kl_loss")
LENGTHS = ((1, 4, 40, 3), (9, 2, 2, 30), (5, 60, 1, 7), (3, 12, 6, 20))
MASKED = (1, 6, 7, 13)  # rows without a token in the loss
LOUD = 2  # a row with a huge loss


def material():
    """Sixteen rows: four prompts by four responses of skewed lengths."""
    g = torch.Generator().manual_seed(7)
    rows = [
        (p, tokens(n, g)) for p, ns in zip((tokens(n, g) for n in (19, 6, 11, 2)), LENGTHS, strict=True) for n in ns
    ]
    data = verl_batch(rows)
    fields = {}
    for key in ("advantages", "old_log_probs", "ref_log_prob", "loss_mask"):
        fields[key] = [x.clone() for x in data[key].unbind()]
    for row in MASKED:
        fields["loss_mask"][row].zero_()
    fields["loss_mask"][8 + 1][10:20] = 0  # a tool's answer
    fields["advantages"][LOUD] *= 50
    return rows, fields


def batch_of(rows, fields, chosen, **settings):
    data = verl_batch([rows[i] for i in chosen], global_batch_size=len(rows), **settings)
    for key, values in fields.items():
        data[key] = jagged([values[i] for i in chosen])
    data["response_mask"] = data["loss_mask"]
    return data


def oracle(path, mode):
    """Loss, metrics and gradients of all rows as one batch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    rows, fields = material()
    data = batch_of(rows, fields, range(len(rows)))
    lens = [len(p) for p, _ in rows]
    whole = lambda values: jagged([F.pad(v, (n - 1, 1)) for n, v in zip(lens, values, strict=True)])  # noqa: E731
    log_probs, entropy = per_row(model, rows)
    num_tokens = sum(int(mask.sum()) for mask in fields["loss_mask"])
    data.set_non_tensor("dp_size", 1)
    data.set_non_tensor("batch_num_tokens", num_tokens)
    loss, metrics = loss_function(mode)(
        model_output={"log_probs": whole(log_probs), "entropy": whole(entropy)}, data=data
    )
    loss.backward()
    return float(loss), {key: float(metrics[key].values[0]) for key in METRICS}, gradients(model)


def loss_function(mode, **options):
    return ppo_loss_function(**{"loss_agg_mode": mode, "loss_scale_factor": 64} | options)


def splits_of(num_rows):
    """Micro-batches of one rank's rows, which come in groups of four neighbours; None leaves it to the budget."""
    rows = list(range(num_rows))
    groups = [rows[i : i + 4] for i in range(0, num_rows, 4)]
    return {
        "whole": ([rows], {}),
        "by group": (groups, {}),
        "every group cut": ([half for group in groups for half in (group[::2], group[1::2])], {}),
        "one row each": ([[row] for row in rows], {}),
        "by budget": (None, {"max_token_len_per_gpu": 75}),
    }


def compare_splits(rank, path, world_size, expected):
    from zorro_verl.micro_batches import MicroBatches

    rows, fields = material()
    engine = build_engine(path, "zorro")
    split = MicroBatches.split
    parts = {1: [range(16)], 2: [range(8 * rank, 8 * rank + 8), range(rank, 16, 2)]}[world_size]
    counts = set()
    for mode, part in itertools.product(MODES, parts):
        loss, metrics, grads = expected[mode]
        for name, (micro_batches, settings) in splits_of(len(part)).items():
            if part is not parts[0] and name != "whole":
                continue  # over two ranks with every group torn apart: one split is enough
            case = f"{mode}, {name}, rows {part}"
            forced = lambda self, *args, m=micro_batches, **kwargs: m  # noqa: E731
            MicroBatches.split = split if micro_batches is None else forced
            data = batch_of(rows, fields, part, **settings)
            engine.optimizer_zero_grad()
            with engine.train_mode():
                output = engine.forward_backward_batch(data, loss_function(mode))
                got = full_gradients(engine)
            counts.add(len(output["loss"]))
            assert worst_gradient(grads, got) <= TOLERANCE, (case, worst_gradient(grads, got))
            sums = torch.tensor([sum(output["loss"])] + [sum_of(output["metrics"][key]) for key in METRICS])
            torch.distributed.all_reduce(sums)
            for key, want, have in zip(("loss", *METRICS), (loss, *metrics.values()), sums / world_size, strict=True):
                assert float(have) == pytest.approx(want, rel=TOLERANCE, abs=TOLERANCE), (case, key)
    MicroBatches.split = split
    assert {1, 16 // world_size} < counts, "all splits were the same"
    return None


def sum_of(metric):
    return sum(float(value) for m in (metric if isinstance(metric, list) else [metric]) for value in m.values)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny_model(dtype=torch.float32).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def expected(checkpoint):
    return {mode: oracle(checkpoint, mode) for mode in MODES}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_split_changes_loss_or_gradients(checkpoint, expected, world_size):
    run_ranks(compare_splits, world_size, checkpoint, world_size, expected, timeout=200)


def test_the_modes_differ(expected):
    """Else a mode that is ignored would not be seen."""
    losses = [loss for loss, _, _ in expected.values()]
    assert all(abs(a - b) > 1e-3 for a, b in itertools.combinations(losses, 2)), losses
