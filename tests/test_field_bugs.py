"""Mistakes that packing and shared prompts have met elsewhere: the right value for each.

Masks and padding, who sees whom, kernels' edges; and what the loss makes of it, against verl's own loss on log-probs of
the unpatched model, one unpadded row at a time.
"""

import copy
from functools import cache, partial

import pytest
import torch
from ranks import run_ranks
from subjects import FLOAT64, KINDS, Actor, PatchedModel, check, loss_of, make_subject, oracle
from test_engine import build_engine, full_gradients, local_rows, ppo_loss_function
from tiny import VOCAB, batch_b0, gradients, padded_batch, shuffled, tiny_model, tokens, verl_batch, worst_gradient

from zorro_verl.varlen import CpuKernels

ROWS = shuffled(batch_b0(), 0)
BATCH = padded_batch(ROWS)
SEAMS = [
    pytest.param(
        {"attention": attention, "use_split_attention": split}, id=f"{attention}-{'split' if split else 'rows'}"
    )
    for attention in ("eager", "sdpa")
    for split in (True, False)
]


@pytest.fixture(params=KINDS)
def make(request, tmp_path):
    """Builds the subject of this test for a model; ``patched=`` are options of the patched model alone."""

    def build(plain=None, patched=None, **options):
        options |= (patched if request.param.startswith("patched") else None) or {}
        return make_subject(request.param, tiny_model() if plain is None else plain, tmp_path, **options)

    return build


def group(prompt_len, response_lens, seed=0):
    g = torch.Generator().manual_seed(seed)
    prompt = tokens(prompt_len, g)
    return [(prompt, tokens(n, g)) for n in response_lens]


def square_batch():
    """Two groups of three rows, without padding."""
    return padded_batch([row for rows in zip(group(5, (4,) * 3), group(5, (4,) * 3, 1), strict=True) for row in rows])


# Masks, padding, and who sees whom.


@pytest.mark.parametrize("options", SEAMS)
@pytest.mark.parametrize("response_len", [4, None])
def test_a_mask_of_ones_is_no_mask(options, response_len):
    """Whether a mask is there at all must not decide what siblings see of each other."""
    plain, batch = tiny_model(), square_batch()
    subject = PatchedModel(plain, response_len=response_len, **options)
    ids, ones, positions = (batch[name] for name in ("input_ids", "attention_mask", "position_ids"))
    bare = subject.model(ids).logits
    for mask in (None, ones, ones.bool(), ones.float()):
        for position_ids in (None, positions, positions[:1]):
            logits = subject.model(ids, attention_mask=mask, position_ids=position_ids).logits
            assert torch.equal(logits, bare)
    check(subject, plain, batch)
    with pytest.raises(ValueError, match=r"attention_mask: expected \(B, S\)"):
        subject.model(ids, attention_mask=torch.ones(6, 1, 9, 9).tril() > 0)


def flipped(batch, rows, column):
    """``batch`` with another token in one column of some rows."""
    batch = copy.deepcopy(batch)
    batch["input_ids"][rows, column] = batch["input_ids"][rows, column] % (VOCAB - 1) + 1
    return batch


@pytest.mark.parametrize("options", SEAMS)
def test_who_sees_whom(options):
    """Bit by bit: a response token moves what follows it in its row, a prompt token every sibling, and nothing else."""
    subject, mask = PatchedModel(tiny_model(), **options), BATCH["attention_mask"].bool()
    logits_of = lambda batch: subject.model(batch["input_ids"], attention_mask=mask.long()).logits  # noqa: E731
    prompts = [tuple(p.tolist()) for p, _ in ROWS]
    with torch.no_grad():
        before = logits_of(BATCH)
        for row in range(len(ROWS)):
            for column in {int(mask[row].int().argmax()), 6, 7, 9, 14} & set(mask[row].nonzero().flatten().tolist()):
                members = [i for i, p in enumerate(prompts) if p == prompts[row]] if column < 7 else [row]
                after = logits_of(flipped(BATCH, members, column))
                same = (before == after).all(-1)
                for other in range(len(ROWS)):
                    moved = torch.zeros_like(mask[other])
                    if other in members:
                        moved[column:] = mask[other, column:]
                    assert torch.equal(~same[other], moved), (row, column, other)


def test_another_attention_set_on_a_patched_model():
    """The layers would run without the plan, and with a mask that knows nothing of siblings."""
    plain = tiny_model()
    subject = PatchedModel(plain, "sdpa")
    subject.model.set_attn_implementation("eager")
    check(subject, plain, BATCH)
    subject.patcher.unpatch()
    assert subject.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_dropout_of_a_patched_model(attention):
    """Siblings would share one draw for their prompt, which is not what the plain model does."""
    plain = tiny_model(attention_dropout=0.3)
    subject = PatchedModel(plain, attention)
    plain.eval()
    subject.model.eval()
    check(subject, plain, BATCH)
    subject.model.train()
    with pytest.raises(ValueError, match=r"attention_dropout: expected 0 in training, got 0\.3"):
        subject.values(BATCH)


def test_pad_id_that_is_a_token(make):
    """Only the mask says what padding is, whatever stands at either end of prompt or response."""
    prompts = [torch.tensor(p) for p in ([0, 4, 5], [4, 0, 5], [4, 5, 0], [0, 0, 0], [0])]
    responses = [torch.tensor(r) for r in ([0, 7, 8], [7, 0], [0], [0, 0, 0, 9])]
    rows = shuffled([(p, r) for p in prompts for r in responses[:3]] + [(prompts[3], responses[3])], 0)
    subject = make()
    check(subject, tiny_model(), padded_batch(rows, prompt_width=7, response_width=8))
    assert subject.stats["groups"] == 5


def test_padding_columns_change_no_bit(make):
    """What a padded batch is wrong about, packing must not be measured against: any width gives the same bits."""
    subject = make(patched={"response_len": None})
    expected = subject.values(BATCH)
    for left in (0, 1, 16):
        for right in (0, 1, 16):
            got = subject.values(padded_batch(ROWS, prompt_width=7 + left, response_width=8 + right, pad=left))
            for a, b in zip(expected, got, strict=True):
                assert all(map(torch.equal, a, b)), (left, right)


def test_right_padded_prompts(make):
    """Padding between prompt and response is padding like any other."""
    batch = padded_batch(ROWS)
    for row, (p, _) in enumerate(ROWS):
        for name in ("input_ids", "attention_mask", "position_ids"):
            batch[name][row, :7] = batch[name][row, :7].roll(len(p) - 7)
    subject = make()
    check(subject, tiny_model(), batch)
    assert subject.stats["groups"] == 3


# Kernels' edges.


@pytest.mark.parametrize("prompt_len", [1, 7])
def test_causal_calls_are_square(prompt_len):
    """How a causal kernel aligns fewer queries with more keys differs by version: no call may depend on it."""
    plain, calls = tiny_model(), []
    subject = PatchedModel(plain, "sdpa")

    class Recording(CpuKernels):
        def forward(self, q, k, v, call, scale):
            calls.append(call)
            return super().forward(q, k, v, call, scale)

    subject.model.forward.kernels = Recording()
    check(subject, plain, padded_batch(group(prompt_len, (1, 2, 5)), response_width=8))
    assert [call.causal for call in calls] == [True, False] * 2
    for call in calls:
        if call.causal:
            assert torch.equal(call.cu_seqlens_q, call.cu_seqlens_k)
        assert all(q1 > q0 and k1 > k0 for q0, q1, k0, k1 in call.blocks)


@pytest.mark.parametrize("total", [2, 127, 128, 129, 255])
def test_packed_lengths_around_the_blocks_of_kernels(make, total):
    """Kernels work in blocks of 64 or 128: one token less or more must not reach the gradient."""
    responses = (1,) if total == 2 else (5, 1, 8)
    subject = make()
    check(subject, tiny_model(), padded_batch(group(total - sum(responses), responses), response_width=8))
    assert subject.stats["tokens_packed"] == total


@pytest.mark.parametrize("left", [1, 0])
def test_nothing_to_share(make, left):
    """Groups of one, from the start or by filtering: every row as it is, and no token more."""
    rows = [row for seed in range(5) for row in group(4 + seed, (3, 8, 1, 5), seed)[left::4]]
    subject = make()
    check(subject, tiny_model(), padded_batch(rows, response_width=8))
    assert subject.stats["tokens_packed"] == subject.stats["tokens_total"] == sum(len(p) + len(r) for p, r in rows)
    assert subject.stats["groups"] == 5


# The loss.


def training_batch(rows, seed=0, **tensors):
    batch = padded_batch(rows)
    g = torch.Generator().manual_seed(seed)
    shape = batch["responses"].shape
    batch["old_log_probs"] = (-4 + 0.3 * torch.randn(shape, generator=g)).double()
    batch["ref_log_prob"] = batch["old_log_probs"] + 0.1 * torch.randn(shape, generator=g)
    batch["advantages"] = torch.randn(shape, generator=g).double()
    batch["response_mask"] = batch["attention_mask"][:, -shape[1] :].clone()
    return batch | tensors


def loss_config(**options):
    from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig

    defaults = {"use_kl_loss": True, "kl_loss_coef": 0.02, "entropy_coeff": 0.01, "use_dynamic_bsz": True}
    optim = FSDPOptimizerConfig(lr=1e-2, clip_grad=1e9)
    return FSDPActorConfig(strategy="fsdp2", rollout_n=1, optim=optim, **defaults | options)


def reference_loss(plain, batch, config):
    """verl's loss as its workers put it together, on the oracle's log-probs and entropies; and its three parts."""
    from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla, kl_penalty

    mask, width = batch["response_mask"], batch["responses"].shape[1]
    values = oracle(plain, batch, Actor)
    log_prob, entropy = (torch.stack([torch.nn.functional.pad(x, (0, width - len(x))) for x in v]) for v in values)
    config = copy.copy(config)
    info = {"dp_size": 1, "batch_num_tokens": max(1, int(mask.sum())), "global_batch_size": len(mask)}
    object.__setattr__(config, "global_batch_info", info | {"loss_scale_factor": config.loss_scale_factor or width})
    mean = partial(agg_loss, loss_mask=mask, loss_agg_mode=config.loss_agg_mode, **config.global_batch_info)
    old, advantages = batch["old_log_probs"], batch["advantages"]
    policy, _ = compute_policy_loss_vanilla(old, log_prob, advantages, mask, config.loss_agg_mode, config)
    entropy = mean(loss_mat=entropy)
    kl = mean(loss_mat=kl_penalty(log_prob, batch["ref_log_prob"], config.kl_loss_type))
    return policy - config.entropy_coeff * entropy + config.kl_loss_coef * kl, (policy, entropy, kl)


def assert_each_close(expected, got, tolerance, what):
    """Every tensor against its own norm, the worst by name."""
    assert expected.keys() == got.keys()
    distances = {name: float((x - got[name]).norm() / x.norm()) for name, x in expected.items()}
    worst = max(distances, key=distances.get)
    assert distances[worst] <= tolerance, f"{what} of {worst}: {distances[worst]}"


def five_steps(actor, plain, batch):
    """SGD on the shared path and on the rows: the same losses, gradients and weights all along."""
    config, losses = actor.actor.actor_config, []
    models = (plain, actor.model)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, _ = reference_loss(plain, batch, config)
        expected.backward()
        got = actor.actor.compute_policy_loss_and_backward(batch)["actor/policy_loss"]
        losses.append(got)
        if step == 0:
            assert_each_close(gradients(plain), gradients(actor.model), FLOAT64, "gradient")
        assert abs(expected.item() - got) <= 10 * FLOAT64, step
        for optimizer in optimizers:
            optimizer.step()
        assert_each_close(*(dict(model.named_parameters()) for model in models), 10 * FLOAT64, "weight")
    assert abs(losses[0] - losses[-1]) > 1e-2, "nothing was learned: the comparison is blind"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_five_steps_stay_together(tmp_path, attention):
    """A wrong gradient leaves the first loss right, and drifts from the second step on."""
    plain = tiny_model()
    actor = Actor(plain, attention, tmp_path, actor_config=loss_config())
    five_steps(actor, plain, training_batch(ROWS))


def test_a_prompt_without_gradient_is_noticed(tmp_path):
    """The negative control: prompt keys and values that responses read, but don't train."""

    class Detached(CpuKernels):
        def backward(self, grad, q, k, v, out, lse, call, scale):
            dq, dk, dv = super().backward(grad, q, k, v, out, lse, call, scale)
            return (dq, dk, dv) if call.causal else (dq, dk * 0, dv * 0)

    plain = tiny_model()
    actor = Actor(plain, "sdpa", tmp_path, actor_config=loss_config())
    actor.model.forward.kernels = Detached()
    with pytest.raises(AssertionError, match="gradient of"):
        five_steps(actor, plain, training_batch(ROWS))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_identical_and_nested_responses_each_count(tmp_path, attention):
    """One response may equal, or begin, another: in the loss, each has its own advantage."""
    prompt = torch.tensor([3, 1, 4, 1, 5])
    twice = torch.tensor([7, 8, 9])
    responses = [twice, twice, torch.tensor([7, 8, 9, 10]), twice[:2], torch.tensor([20, 21, 22]), twice[:0]]
    batch = training_batch([(prompt, r) for r in responses])
    plain = tiny_model()
    actor = Actor(plain, attention, tmp_path, actor_config=loss_config(loss_agg_mode="seq-mean-token-mean"))
    losses = []
    for advantages in ([0.9, -0.4, 0.3, -1.0, 0.2, 5.0], [-0.4, 0.9, 0.3, -1.0, 0.2, 5.0]):
        batch["advantages"] = torch.tensor(advantages, dtype=torch.float64)[:, None].expand(-1, 4).contiguous()
        plain.zero_grad()
        actor.model.zero_grad()
        loss, _ = reference_loss(plain, batch, actor.actor.actor_config)
        loss.backward()
        got = actor.actor.compute_policy_loss_and_backward(batch)["actor/policy_loss"]
        assert got == pytest.approx(float(loss), abs=FLOAT64)
        assert_each_close(gradients(plain), gradients(actor.model), FLOAT64, "gradient")
        losses.append(got)
    assert abs(losses[0] - losses[1]) > 1e-3
    assert actor.stats["tokens_packed"] == 5 + 15


LOSS_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


@cache
def skewed_rows():
    """Sixteen rows of four groups, with responses of 1 to 30 tokens."""
    lens = [(1, 30, 2, 4), (3, 3, 25, 1), (6, 1, 1, 12), (2, 9, 5, 1)]
    return shuffled([row for seed, n in enumerate(lens) for row in group(6 + seed, n, seed)], 4)


def skewed_batch():
    """With tool tokens, rows and one whole group out of the loss, and one short row that outweighs all others."""
    rows = skewed_rows()
    batch = training_batch(rows)
    batch["response_mask"][:, 3:5] = 0
    batch["response_mask"][5] = 0
    prompts = [tuple(p.tolist()) for p, _ in rows]
    batch["response_mask"][[p == prompts[0] for p in prompts]] = 0
    short = next(i for i, (p, r) in enumerate(rows) if len(r) == 1 and batch["response_mask"][i].any())
    batch["advantages"][short] = -50.0
    return batch


@cache
def reference_step(mode):
    plain = tiny_model()
    loss, parts = reference_loss(plain, skewed_batch(), loss_config(loss_agg_mode=mode))
    loss.backward()
    return float(loss), [float(x) for x in parts], gradients(plain)


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_no_way_to_cut_a_batch_changes_the_loss(tmp_path, mode):
    """Every aggregation counts over the whole mini-batch, so that micro-batches and cut groups make no difference."""
    from verl import DataProto

    loss, parts, expected = reference_step(mode)
    data, longest = skewed_batch(), max(len(p) + len(r) for p, r in skewed_rows())
    ways = {
        "whole": ({"max_token_len": 10_000}, 0),
        "by group": ({"max_token_len": 43}, 0),
        "groups cut": ({"max_token_len": 38}, 1),
        "one row granted": ({"use_dynamic_bsz": False, "micro_batch_size": 1}, 1),
    }
    assert longest == 36
    for way, (settings, least_split) in ways.items():
        actor = Actor(tiny_model(), "sdpa", tmp_path, actor_config=loss_config(loss_agg_mode=mode, ppo_epochs=1))
        actor.actor.optimizer = torch.optim.SGD(actor.model.parameters(), lr=1.0)
        before = {name: p.detach().clone() for name, p in actor.model.named_parameters()}
        metrics = actor.actor.update_policy(DataProto.from_dict(dict(data), meta_info=settings))
        step = {name: before[name] - p.detach() for name, p in actor.model.named_parameters()}
        assert worst_gradient(expected, step) <= FLOAT64, way
        assert metrics["actor/loss"] == pytest.approx(loss, abs=FLOAT64), way
        for name, part in zip(("actor/pg_loss", "actor/entropy_loss", "actor/kl_loss"), parts, strict=True):
            assert metrics[name] == pytest.approx(part, abs=FLOAT64), (way, name)
        assert actor.stats["groups"] == 4
        assert (actor.stats["groups_split"] > 0) == (least_split > 0), way


def modes_on_two_ranks(rank, path):
    rows = local_rows(skewed_rows(), rank, 2)
    stock, zorro = build_engine(path, "fsdp2"), build_engine(path, "zorro")
    with stock.train_mode(), zorro.train_mode():
        for mode in LOSS_MODES:
            grads, losses = [], []
            for engine, settings in ((stock, {"use_remove_padding": False}), (zorro, {"max_token_len_per_gpu": 38})):
                engine.optimizer_zero_grad()
                data = verl_batch(rows, seed=rank, global_batch_size=len(skewed_rows()), **settings)
                loss = ppo_loss_function(loss_agg_mode=mode, loss_scale_factor=16)
                losses.append(sum(engine.forward_backward_batch(data, loss)["loss"]))
                grads.append(full_gradients(engine))
            assert losses[0] == pytest.approx(losses[1], rel=2e-5, abs=2e-5), mode
            assert worst_gradient(*grads) <= 2e-5, mode


@pytest.mark.slow
def test_every_aggregation_on_two_ranks(tmp_path):
    """The share of a rank is scaled by the number of ranks once, whatever the aggregation."""
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    run_ranks(modes_on_two_ranks, 2, str(tmp_path))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_first_ratio_is_one(tmp_path, temperature):
    """Old and new log-probs are of the same scaled logits: nothing is scaled twice, nothing is forgotten."""
    from verl import DataProto

    actor = Actor(tiny_model(), "sdpa", tmp_path, actor_config=loss_config()).actor
    batch = training_batch(ROWS)
    scored = actor.compute_log_prob(DataProto.from_dict(dict(batch), meta_info={"temperature": temperature}))
    batch["old_log_probs"] = scored["log_probs"]
    metrics = actor.compute_policy_loss_and_backward(batch, temperature=temperature)
    assert abs(metrics["actor/ppo_kl"]) <= 1e-12
    assert metrics["actor/pg_clipfrac"] == 0
    other = actor.compute_policy_loss_and_backward(batch, temperature=temperature + 0.3)
    assert abs(other["actor/ppo_kl"]) > 1e-3


@pytest.mark.parametrize(
    "temperature", [0.0, torch.tensor([1.0, 0.0, 0.7, 1.0, 1.0, 0.0, 2.0, 1.0])], ids=["all", "some"]
)
def test_temperature_zero_is_the_least_that_verl_divides_by(tmp_path, temperature):
    """A greedy run's temperature of 0 must not turn weights into NaN."""
    plain = tiny_model()
    actor = Actor(plain, "sdpa", tmp_path)
    floor = torch.as_tensor(temperature, dtype=torch.float64).clamp(min=1e-8).expand(len(ROWS))
    expected, got = oracle(plain, BATCH, actor, floor)[0], actor.values(BATCH, temperature=temperature)
    for a, b, t in zip(expected, got[0], floor.tolist(), strict=True):
        assert not len(a) or (a - b).abs().max() <= FLOAT64 / t
    loss_of(got).backward()
    assert all(grad.isfinite().all() for grad in gradients(actor.model).values())


def test_no_token_in_the_loss_moves_no_weight(tmp_path):
    """0 / 0 in a fully masked mini-batch would be NaN, and weight decay alone would still move the weights."""
    batch = training_batch(ROWS)
    batch["response_mask"] *= 0
    actor = Actor(tiny_model(), "sdpa", tmp_path, actor_config=loss_config())
    before = copy.deepcopy(actor.model.state_dict())
    metrics = actor.actor.update_policy(batch)
    assert all(torch.equal(before[name], x) for name, x in actor.model.state_dict().items())
    assert all(torch.tensor(x).isfinite() for x in metrics.values())
    assert metrics["actor/loss"] == 0


def test_log_probs_and_entropy_stay_in_their_bounds(make):
    """No probability is above 1, and no entropy above that of a uniform choice."""
    log_probs, entropies = (torch.cat(list(x)) for x in make(tiny_model(dtype=torch.float32)).values(BATCH))
    assert log_probs.isfinite().all()
    assert log_probs.max() <= 1e-6
    assert entropies.min() >= -1e-6
    assert entropies.max() <= torch.tensor(float(VOCAB)).log() + 1e-5
