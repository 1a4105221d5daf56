"""What planning costs, counted and not timed: waits of the host, operations, and how often prompts are hashed."""

import copy
import json
from collections import Counter
from functools import partial

import bench_plan
import pytest
import tiny_models
import torch
from ranks import run_ranks
from test_engine import build_engine, ppo_loss_function
from tiny import batch_b0, flat_rows, padded_batch, shuffled, tiny_model, tokens, verl_batch
from torch.utils._python_dispatch import TorchDispatchMode

from zorro_verl import grouping, micro_batches
from zorro_verl.grouping import find_prompt_groups
from zorro_verl.heads import SharedPrompt
from zorro_verl.models import install
from zorro_verl.packing import build_plan

aten = torch.ops.aten
# Operations whose result, or its shape, the host has to know: on a device it waits for everything before them.
WAITS = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.repeat_interleave,
}
# The same where no operation is dispatched on a CPU.
READS = ("tolist", "cpu", "numpy", "to")


class Waits(TorchDispatchMode):
    """Counts, by name, what a host would wait for if the tensors were on a device."""

    def __init__(self):
        super().__init__()
        self.found = Counter()
        self.reads = _Reads(self.found)

    def __enter__(self):
        self.reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.reads.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        sized = packet is aten.repeat_interleave and (kwargs or {}).get("output_size") is not None
        if packet in WAITS and not sized:
            self.found[str(packet)] += 1
        if packet in (aten.index, aten.index_put, aten.index_put_):
            self.found["bool index"] += sum(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        return func(*args, **kwargs or {})


class _Reads:
    """Counts calls of methods of tensors, in place of which it stands for the while: in a backward, too."""

    def __init__(self, found):
        self.found = found
        self.own = {name: getattr(torch.Tensor, name) for name in READS}

    def __enter__(self):
        for name in READS:
            setattr(torch.Tensor, name, self.counted(name))

    def __exit__(self, *error):
        for name in READS:
            delattr(torch.Tensor, name)  # the one of its base class comes back

    def counted(self, name):
        def method(tensor, *args, **kwargs):
            place = kwargs.get("device", args[0] if args else None)
            if name != "to" or (isinstance(place, str | torch.device) and torch.device(place).type == "cpu"):
                self.found[name] += 1
            return self.own[name](tensor, *args, **kwargs)

        return method


class ReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad.tolist()
        return grad


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda x: x.sum().item(), id="item"),
        pytest.param(lambda x: bool(x.any()), id="bool"),
        pytest.param(lambda x: [0, 1, 2, 3][x[0]], id="index"),
        pytest.param(lambda x: torch.arange(9)[: x[1]], id="slice"),
        pytest.param(lambda x: x.tolist(), id="tolist"),
        pytest.param(lambda x: x.cpu(), id="cpu"),
        pytest.param(lambda x: x.to("cpu"), id="to-cpu"),
        pytest.param(lambda x: x.numpy(), id="numpy"),
        pytest.param(lambda x: x[x > 1], id="bool-index"),
        pytest.param(lambda x: x.nonzero(), id="nonzero"),
        pytest.param(lambda x: x.unique(), id="unique"),
        pytest.param(lambda x: x.repeat_interleave(x), id="repeat"),
        pytest.param(lambda x: torch.equal(x, x + 1), id="equal"),
        pytest.param(lambda x: ReadInBackward.apply(x.double().requires_grad_()).sum().backward(), id="in-backward"),
    ],
)
def test_the_spy_sees_each_kind_of_wait(read):
    x = torch.arange(1, 4)
    with Waits() as waits:
        read(x)
    assert waits.found.total() == 1, waits.found
    with Waits() as waits:
        x.repeat_interleave(x, output_size=6).to(torch.int32) + torch.arange(6)
    assert waits.found.total() == 0, waits.found


def half_and_half(first, second, layers):
    return {"num_hidden_layers": layers, "layer_types": [first, second] * (layers // 2)}


windowed = partial(half_and_half, "sliding_attention", "full_attention")
hybrid = partial(half_and_half, "linear_attention", "full_attention")


def deep(layers):
    return {"num_hidden_layers": layers}


def experts(layers):
    return {"num_hidden_layers": layers, "mlp_only_layers": []}


def waits_of(step, model):
    step(model)  # what is made once for a model is no part of a step
    with Waits() as waits:
        step(model)
    return waits.found


def shared_step(rows, model):
    plan = build_plan(rows)
    shared = SharedPrompt(plan, rows.tokens[plan.label_index], calculate_entropy=True)
    packed = {"input_ids": plan.pack(rows.tokens)[None], "position_ids": plan.pack(rows.position_ids)[None]}
    output = model(**packed, use_cache=False, zorro=shared)
    (output["log_probs"] + output["entropy"]).sum().backward()


def plain_step(rows, model):
    """As many tokens without a plan: what the model's own layers wait for."""
    ids = rows.tokens[: build_plan(rows).num_tokens][None]
    model(input_ids=ids, use_cache=False).logits.sum().backward()


@pytest.mark.parametrize(
    ("name", "sized", "options"),
    [
        pytest.param("qwen3", deep, {}, id="dense"),
        pytest.param("qwen3", deep, {"attn_implementation": "eager"}, id="reference"),
        pytest.param("qwen3", deep, {"use_split_attention": False}, id="attention-on-rows"),
        pytest.param("qwen3", deep, {"checkpointing": True}, id="checkpointing"),
        pytest.param("ministral", windowed, {}, id="windows"),
        pytest.param("ministral", windowed, {"attn_implementation": "eager"}, id="windows-reference"),
        pytest.param("qwen3_moe", experts, {}, id="experts"),
        pytest.param("qwen3_next", hybrid, {"linear_attention": "fork"}, id="linear-fork"),
        pytest.param("qwen3_5_text", hybrid, {"linear_attention": "expand", "checkpointing": True}, id="linear-expand"),
    ],
)
def test_no_layer_waits_for_the_device(name, sized, options):
    """Two more layers cost no wait but the plain model's own, forward and backward; nor do more groups or rows."""
    options = {"attn_implementation": "sdpa"} | options
    checkpointing = options.pop("checkpointing", False)
    few, many = flat_rows(batch_b0()), flat_rows(batch_b0() + batch_b0(1) + batch_b0(2)[:4])
    found = {}
    for layers in (2, 4):
        plain = tiny_models.build(name, dtype=torch.float32, **sized(layers)).train()
        if checkpointing:
            plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        shared = copy.deepcopy(plain)
        install(shared, **options)
        found["plain", layers] = waits_of(partial(plain_step, few), plain)
        found["shared", layers] = waits_of(partial(shared_step, few), shared)
    for kind in set().union(*found.values()):
        own = found["plain", 4][kind] - found["plain", 2][kind]
        assert found["shared", 4][kind] - found["shared", 2][kind] == own, (kind, found)
    assert waits_of(partial(shared_step, many), shared) == found["shared", 4]


@pytest.mark.gpu
def test_no_layer_waits_for_a_gpu():
    """With layers of both kinds of attention, forward and backward, after a first step has made what lasts."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = tiny_models.build("ministral", dtype=torch.bfloat16, **windowed(4)).train().cuda()
    install(model)
    rows = flat_rows(batch_b0())
    rows = grouping.Rows(rows.tokens.cuda(), rows.position_ids.cuda(), rows.cu_seqlens, rows.prompt_lens)
    shared_step(rows, model)

    def mode(name):
        return lambda *_: torch.cuda.set_sync_debug_mode(name)

    model.model.layers[0].register_forward_pre_hook(mode("error"))
    model.model.layers[-1].register_forward_hook(mode("default"))
    # In the backward the last layer is the first, and the first the last.
    model.model.layers[-1].register_full_backward_pre_hook(mode("error"))
    model.model.layers[0].register_full_backward_hook(mode("default"))
    try:
        shared_step(rows, model)
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            rows.tokens.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Work(TorchDispatchMode):
    """Counts operations and the elements that they write."""

    def __init__(self):
        super().__init__()
        self.operations, self.elements = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **kwargs or {})
        self.operations[str(func)] += 1
        for result in output if isinstance(output, tuple | list) else (output,):
            if isinstance(result, torch.Tensor) and not func.is_view:
                self.elements += result.numel()
        return output


def planning(num_groups, num_rows, prompt, response, axes=0):
    """What it takes to plan so many rows of each group, all alike in length and in turn: rows and the work."""
    g = torch.Generator().manual_seed(0)
    prompts = [tokens(prompt, g) for _ in range(num_groups)]
    rows = flat_rows([(p, tokens(response, g)) for _ in range(num_rows) for p in prompts])
    if axes:
        rows.position_ids = rows.position_ids.repeat(axes, 1)
    with Work() as work:
        plan = build_plan(rows)
    assert plan.num_groups == num_groups
    return rows, work


def test_operations_do_not_grow_with_groups_rows_or_tokens():
    _, few = planning(2, 2, 150, 20)
    for shape in ((40, 2, 150, 20), (2, 30, 150, 20), (5, 5, 700, 3)):
        assert planning(*shape)[1].operations == few.operations, shape


@pytest.mark.parametrize(("axes", "most"), [(0, 11.5), (3, 17)])
def test_elements_that_planning_writes(axes, most):
    """For each row token: two columns (tokens, positions) take 2 each to hash and 3 to compare, and axes 3; indices 1.

    A hash that mixes each token by itself takes 10 times as many.
    """
    rows, work = planning(4, 8, 2000, 100, axes)
    assert work.elements <= most * rows.tokens.numel(), work.elements / rows.tokens.numel()


def test_chunks_change_nothing(monkeypatch):
    """Prompts are hashed and compared in chunks: the last may be short, and a prompt may lie across two."""
    g = torch.Generator().manual_seed(1)
    prompts = [tokens(n, g) for n in (700, 64, 65, 129, 1, 640)]
    prompts += [p.clone() for p in prompts]
    prompts[6][333] += 1
    prompts[9][128] += 1
    pairs = [(p, tokens(i, g)) for i, p in enumerate(prompts)]
    rows = flat_rows(pairs)
    whole = grouping.prompt_fingerprints(rows), find_prompt_groups(rows)
    monkeypatch.setattr(grouping, "CHUNK", 3 * grouping.BLOCK)
    assert torch.equal(grouping.prompt_fingerprints(rows), whole[0])
    assert torch.equal(find_prompt_groups(rows), whole[1])
    assert whole[1].tolist() == [0, 1, 2, 3, 4, 5, 6, 1, 2, 7, 4, 5]
    assert len(set(whole[0].tolist())) == 8
    alone = [grouping.prompt_fingerprints(flat_rows([pair])) for pair in pairs]
    assert torch.equal(torch.cat(alone), whole[0]), "a fingerprint is of the prompt alone"


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129, 200])
@pytest.mark.parametrize("collide", [False, True])
def test_every_token_and_position_of_a_prompt_counts(length, collide, monkeypatch):
    """One of them changed at a time, alone and, with equal hashes, by comparison."""
    if collide:
        monkeypatch.setattr(grouping, "prompt_fingerprints", lambda rows: torch.zeros(rows.num_rows, dtype=torch.int64))
    prompt = tokens(length, torch.Generator().manual_seed(length))
    rows = flat_rows([(prompt, prompt[:3])] * (2 * length + 1))
    starts = rows.cu_seqlens[1:-1]
    rows.tokens[starts[:length] + torch.arange(length)] += 1
    rows.position_ids[starts[length:] + torch.arange(length)] += 1
    assert find_prompt_groups(rows).tolist() == list(range(2 * length + 1))


def test_fingerprints_know_the_order_of_blocks_and_the_positions():
    g = torch.Generator().manual_seed(2)
    first, second, rest = (tokens(n, g) for n in (grouping.BLOCK, grouping.BLOCK, 5))
    rows = flat_rows(
        [(torch.cat(p), rest) for p in ((first, second, rest), (second, first, rest), (first, second, rest))]
    )
    rows.position_ids.zero_()  # growing ones would tell blocks apart by themselves
    rows.position_ids[rows.cu_seqlens[2] :] += 1
    assert len(set(grouping.prompt_fingerprints(rows).tolist())) == 3


class Hashes:
    """Counts how often prompts are hashed."""

    def __init__(self, patch):
        self.count, original = 0, grouping.prompt_fingerprints

        def counted(rows):
            self.count += 1
            return original(rows)

        for module in (grouping, micro_batches):
            patch(module, "prompt_fingerprints", counted)


def test_the_actor_hashes_a_batch_once_a_call(tmp_path, monkeypatch):
    from verl.workers.config import FSDPActorConfig

    from zorro_verl.actor import DeduplicatedActor

    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=4,
        ppo_epochs=2,
        shuffle=True,
        use_dynamic_bsz=True,
        ppo_max_token_len_per_gpu=24,
    )
    actor = DeduplicatedActor(model_name_or_path=str(tmp_path), device="cpu", actor_config=config)
    batch = padded_batch(shuffled(batch_b0(), 3))
    zeros = torch.zeros(batch["responses"].shape)
    training = batch | {"old_log_probs": zeros - 4, "advantages": zeros + 1}
    hashes = Hashes(monkeypatch.setattr)
    calls = []
    prepare = actor.prepare_model_inputs
    monkeypatch.setattr(actor, "prepare_model_inputs", lambda *args: calls.append(args) or prepare(*args))
    for call, argument, parts in (
        (actor.forward, batch, 0),
        (actor.compute_policy_loss_and_backward, training, 1),
        (actor.compute_log_prob, batch, 2),
        (actor.update_policy, training, 4),
    ):
        hashes.count = 0
        calls.clear()
        call(argument)
        assert hashes.count == 1, call
        assert len(calls) >= parts, "nothing was cut: the test is blind"


def hashes_of_an_engine(rank, path):
    hashes = Hashes(setattr)
    engine = build_engine(path, "zorro")
    parts = []
    step = engine.forward_step
    engine.forward_step = lambda micro_batch, **options: parts.append(micro_batch) or step(micro_batch, **options)
    rows = shuffled(batch_b0() + batch_b0(1), 2)
    data = verl_batch(rows, max_token_len_per_gpu=40)
    keys = set(data.keys())
    with engine.train_mode():
        whole = engine.train_batch(data, loss_function=ppo_loss_function())
    assert len(parts) > 2, "nothing was cut: the test is blind"
    assert hashes.count == 1, hashes.count
    assert set(data.keys()) == keys, "the caller's batch was changed"
    assert whole["metrics"]["zorro/tokens_packed"] == [sum(p.num_tokens for p in map(plan_of, parts))]

    # A micro-batch that comes from elsewhere brings no groups: they are found.
    hashes.count = 0
    with engine.eval_mode(), torch.no_grad():
        _, args = engine.prepare_model_inputs(verl_batch(rows))
    assert hashes.count == 1
    assert args["plan"].group_index.tolist() == find_prompt_groups(flat_rows(rows)).tolist()


def plan_of(micro_batch):
    from zorro_verl.verl_rows import rows_from_verl

    return build_plan(rows_from_verl(micro_batch)[0])


def test_an_engine_hashes_a_batch_once(tmp_path):
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path)
    run_ranks(hashes_of_an_engine, 1, str(tmp_path))


def test_the_benchmark_runs_and_counts_what_a_case_has(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert bench_plan.main(["--cases", "small", "--rounds", "1", "--seconds", "0", "--json", str(path)]) == 0
    (result,) = json.loads(path.read_text())["results"]
    assert "small: " in capsys.readouterr().out
    rows = bench_plan.CASES["small"].build()
    plan = build_plan(rows, find_prompt_groups(rows))
    assert (result["row_tokens"], result["packed_tokens"]) == (plan.num_row_tokens, plan.num_tokens)
