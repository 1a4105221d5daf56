"""`zorro-verl verify`: what equals passes, what is broken does not, a mistake is one line."""

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from typer.testing import CliRunner

from zorro_verl import __version__, checkpoint, equivalence, linear_attention, verify
from zorro_verl.checkpoint import config_of, load, quiet_loading, skeleton
from zorro_verl.cli import app
from zorro_verl.equivalence import (
    Batch,
    Comparison,
    Outcome,
    Sharing,
    plain_outcome,
    ragged_batch,
    shared_outcome,
    widened,
)
from zorro_verl.grouping import Rows
from zorro_verl.heads import SharedPrompt
from zorro_verl.layer_loading import LayeredCheckpoint
from zorro_verl.layerwise import compare_layer
from zorro_verl.packing import Plan
from zorro_verl.varlen import CpuKernels
from zorro_verl.verify import text_tokens
from zorro_verl.verify_request import Sizes

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "verify_equivalence.py"
SMALL = ("--rows", 7, "--prompt", 9, "--response", 5)
WHOLE, LAYERS = "--whole", "--layer-by-layer"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of tiny models, each saved once."""
    folders = {}

    def folder_of(name, dtype="float64", shard="5GB", **config):
        key = repr((name, dtype, shard, config))
        if key not in folders:
            folders[key] = str(tmp_path_factory.mktemp(name))
            with quiet_loading():
                model = tiny_models.build(name, getattr(torch, dtype), **config)
                model.save_pretrained(folders[key], max_shard_size=shard)
        return folders[key]

    return folder_of


def command(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def report_of(folder, *arguments):
    """The exit code and what the command prints with --json."""
    result = command("--model", folder, *arguments, "--json")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, json.loads(result.stdout)


# What is equal.


@pytest.mark.parametrize("how", [WHOLE, LAYERS])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_moe", "qwen3_5"])
def test_tiny_models_are_equal(saved, name, how):
    code, report = report_of(saved(name), "--dtype", "float64", *SMALL, how)
    assert (code, report["equal"]) == (0, True), report
    quantities = {difference["quantity"] for difference in report["differences"]}
    assert quantities == {"log_probs", "entropy", "gradients"} | (
        {"layer outputs", "input gradients"} if how == LAYERS else set()
    )
    recurrent = name == "qwen3_5"  # layer by layer, attention layers have their own tolerance
    allowed = {2e-5, 5e-6} if recurrent and how == LAYERS else {2e-5} if recurrent else {5e-6}
    assert {difference["tolerance"] for difference in report["differences"]} <= allowed
    assert report["token_ratio"] > 1.5
    assert report["layer_by_layer"] is (how == LAYERS)


@pytest.mark.parametrize("how", [WHOLE, LAYERS])
def test_bfloat16_is_compared_with_float64(saved, how):
    code, report = report_of(saved("qwen3", "bfloat16"), "--dtype", "bfloat16", how)
    assert (code, report["oracle"]) == (0, "float64"), report
    assert all(d["measure"] == "error ratio" for d in report["differences"])
    assert all(0.5 < d["worst"] <= 1.8 for d in report["differences"] if d["quantity"] != "gradients")
    assert all(0.3 < d["worst"] <= 3 for d in report["differences"] if d["quantity"] == "gradients")


def test_the_table(saved):
    result = command("--model", saved("qwen3_moe"), "--dtype", "float64", *SMALL)
    assert result.exit_code == 0
    for words in (
        "Qwen3MoeForCausalLM (qwen3_moe), compared as a whole",
        "3 full attention, 2 mixture of experts",
        "7 rows, 3 prompts",
        "token ratio",
        "float64 on cpu",
        "log_probs",
        "gradients",
        "Equal.",
    ):
        assert words in result.output, words
    assert "differs" not in result.output


def test_windows_that_no_row_reaches_are_noted(saved):
    arguments = ("--model", saved("gemma3_text"), "--dtype", "float64", "--response", 3)
    short, long = (command(*arguments, "--prompt", n) for n in (3, 9))
    assert short.exit_code == long.exit_code == 0
    assert "no row reaches beyond the sliding window of 6 tokens" in short.output
    assert "Note" not in long.output


def test_a_config_that_training_refuses_is_noted(saved):
    """Log-probs of a model that is not trained are equal all the same."""
    result = command(saved("seed_oss", attention_dropout=0.1), "--dtype", "float64", *SMALL)
    assert result.exit_code == 0, result.output
    assert "Equal." in result.output
    text = " ".join(result.output.split())
    assert "training is refused with this config: attention_dropout: expected 0 in training, got 0.1; set it" in text


@pytest.mark.parametrize(
    ("name", "arguments", "attention", "ways"),
    [
        ("qwen3", (), "sdpa", []),
        ("qwen3", ("--attn-implementation", "eager"), "eager", []),
        ("qwen3_5_text", (), "sdpa", ["expand", "fork"]),
        ("qwen3_5_text", ("--linear-attention", "auto"), "sdpa", ["expand"]),
        ("qwen3_5_text", ("--linear-attention", "auto", "--prompt", "300"), "sdpa", ["fork"]),
        ("qwen3_5_text", ("--linear-attention", "fork", LAYERS), "sdpa", ["fork"]),
    ],
)
def test_the_report_says_what_ran(saved, name, arguments, attention, ways):
    asked = saved(name), "--dtype", "float64", *SMALL, *arguments
    report = json.loads(command(*asked, "--json").stdout)
    assert (report["attention"], report["linear_attention"]) == (attention, ways)
    assert {d["linear_attention"] for d in report["differences"]} <= set(ways or [None])
    shown = f", linear attention {' and '.join(ways)}" if ways else ""
    assert f"  float64 on cpu, attention {attention}{shown}\n" in command(*asked).output


def test_progress_is_over_rows_and_shared_calls(saved):
    seen = []

    def track(items, what, total):
        items = list(items)
        assert len(items) == total
        seen.append((what, total))
        return items

    verify.verify(saved("qwen3_5_text"), "float64", sizes=Sizes(7, 9, 5), track=track)
    assert seen == [("plain rows", 6), ("shared calls", 2)], "one response is empty"


def test_nothing_but_the_report_is_shown(saved, monkeypatch):
    """Not what transformers says of linear layers, once a process, nor a bar where no terminal is."""
    logging.Logger.warning_once.cache_clear()
    said = []
    handler = logging.Handler()
    handler.emit = said.append
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    result = command(saved("qwen3_5_text"), "--dtype", "float64", *SMALL)
    assert (result.exit_code, result.stderr, said) == (0, "", [])


def test_the_script_and_the_commands_of_the_package(saved):
    arguments = (saved("qwen3"), "--dtype", "float32", *map(str, SMALL))
    finished = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert "Equal." in finished.stdout
    listed = CliRunner().invoke(app, ["--help"])
    assert listed.exit_code == 0
    assert "verify" in listed.output
    version = CliRunner().invoke(app, ["--version"])
    assert (version.exit_code, version.output) == (0, f"zorro-verl {__version__}\n")


def test_the_home_folder_is_expanded(saved, monkeypatch):
    folder = Path(saved("qwen3"))
    monkeypatch.setenv("HOME", str(folder.parent))
    for how in (WHOLE, LAYERS):
        assert command(f"~/{folder.name}", "--dtype", "float64", *SMALL, how).exit_code == 0


def test_help_keeps_its_lines_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = command("--help").output
    assert max(map(len, text.splitlines())) <= 80
    assert "--attn-implementation NAME" in text
    assert "<bool>" not in text
    paragraph = text.split("\n\n")[2].splitlines()
    assert all(len(line) > 60 for line in paragraph[:-1]), "no line ends in mid-sentence"


def test_help_loads_no_torch():
    code = "import sys, zorro_verl.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# What is broken.


def shift_predictors(monkeypatch):
    """Every response token is predicted by the packed token one further."""

    def build(rows, build_plan=equivalence.build_plan):
        plan = build_plan(rows)
        plan.predictor_index = (plan.predictor_index + 1) % plan.num_tokens
        return plan

    monkeypatch.setattr(equivalence, "build_plan", build)


def hide_prompts(monkeypatch):
    """Responses don't see the prompt that they share."""

    def build(rows, build_plan=equivalence.build_plan):
        plan = build_plan(rows)
        plan.forest.cross_calls = []
        return plan

    monkeypatch.setattr(equivalence, "build_plan", build)


def count_positions_on(monkeypatch):
    """The second response of a prompt goes on where the first one ended."""
    monkeypatch.setattr(
        Plan, "pack", lambda plan, x, pack=Plan.pack: pack(plan, x).cummax(0)[0] if x.max() < 20 else pack(plan, x)
    )


def lose_a_little_gradient(monkeypatch):
    """Keys get one part in a thousand too little."""

    def backward(kernels, *arguments, backward=CpuKernels.backward):
        dq, dk, dv = backward(kernels, *arguments)
        return dq, dk * 0.999, dv

    monkeypatch.setattr(CpuKernels, "backward", backward)


def no_number(monkeypatch):
    """A kernel gives NaN."""

    def forward(kernels, *arguments, forward=CpuKernels.forward):
        out, lse = forward(kernels, *arguments)
        return out * float("nan"), lse

    monkeypatch.setattr(CpuKernels, "forward", forward)


@pytest.mark.parametrize("how", [WHOLE, LAYERS])
@pytest.mark.parametrize(
    ("break_it", "found_in"),
    [
        (shift_predictors, "log_probs"),
        (hide_prompts, "log_probs"),
        (count_positions_on, "log_probs"),
        (lose_a_little_gradient, "gradients"),
        (no_number, "log_probs"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_what_is_broken_differs(saved, monkeypatch, break_it, found_in, how):
    break_it(monkeypatch)
    code, report = report_of(saved("qwen3"), "--dtype", "float64", *SMALL, how)
    assert code == 1
    assert not report["equal"]
    differing = {d["quantity"] for d in report["differences"] if not d["equal"]}
    assert found_in in differing
    if break_it is lose_a_little_gradient:
        assert "log_probs" not in differing
    elif how == LAYERS and break_it is not shift_predictors:
        assert "layer outputs" in differing, "the first layer is wrong, and the last one is asked what comes after it"


@pytest.mark.parametrize("how", [WHOLE, LAYERS])
def test_what_is_broken_differs_in_bfloat16(saved, monkeypatch, how):
    hide_prompts(monkeypatch)
    code, _ = report_of(saved("qwen3", "bfloat16"), "--dtype", "bfloat16", *SMALL, how)
    assert code == 1


def forget_prompts(monkeypatch):
    """Forked responses start from zeros."""

    def run(step, rule, inputs, states, options, run=linear_attention._Round.run):
        return run(step, rule, inputs, None if states is None else torch.zeros_like(states), options)

    monkeypatch.setattr(linear_attention._Round, "run", run)


@pytest.mark.parametrize("how", [WHOLE, LAYERS])
def test_both_ways_of_linear_attention_are_compared(saved, monkeypatch, how):
    """What only fork gets wrong is found without asking for fork, and named."""
    forget_prompts(monkeypatch)
    arguments = (saved("qwen3_5_text"), "--dtype", "float64", *SMALL, how)
    code, report = report_of(*arguments)
    assert code == 1
    assert {d["linear_attention"] for d in report["differences"] if not d["equal"]} == {"fork"}
    assert report_of(*arguments, "--linear-attention", "expand")[0] == 0


def test_json_has_no_nan(saved, monkeypatch):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    no_number(monkeypatch)
    result = command(saved("qwen3"), "--dtype", "float64", *SMALL, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout, parse_constant=refuse)
    assert [d["worst"] for d in report["differences"] if d["quantity"] == "log_probs"] == [None]


def outcome(**changes):
    values = {"log_probs": torch.tensor([-1.0, -2.0]), "entropy": torch.tensor([0.5, 0.6])}
    gradients = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1e-3])}
    for name, value in changes.items():
        (values if name in values else gradients)[name] = torch.tensor(value)
    return Outcome(values, gradients)


@pytest.mark.parametrize(
    ("changes", "quantity", "where"),
    [
        ({"log_probs": [-1.0, -2.001]}, "log_probs", "row 1, response token 0"),
        ({"entropy": [float("nan"), 0.6]}, "entropy", "row 0, response token 0"),
        ({"b": [2e-3]}, "gradients", "b"),
        ({"b": [float("nan")]}, "gradients", "b"),
        ({"c": [0.0]}, "gradients", "c: on one side only"),
    ],
)
def test_where_a_difference_is(changes, quantity, where):
    tokens = torch.tensor([1, 2, 1, 3])
    batch = Batch(Rows(tokens, torch.tensor([0, 1, 0, 1]), torch.tensor([0, 2, 4]), torch.tensor([1, 1])))
    comparison = Comparison(batch, tiny_models.build("qwen3", torch.float32))
    assert all(d.equal for d in comparison.differences(outcome(), outcome()))
    (found,) = (d for d in comparison.differences(outcome(), outcome(**changes)) if not d.equal)
    assert (found.quantity, found.where) == (quantity, where)


def sixteen_bit(name):
    """The outcomes of a tiny model in bfloat16: the oracle's, the plain side's, the shared side's."""
    model = tiny_models.build(name, torch.bfloat16)
    batch = ragged_batch(torch.arange(1, 57), Sizes())
    wide, plain = plain_outcome(widened(model, torch.float64), batch), plain_outcome(model, batch)
    with Sharing().on(model):
        return Comparison(batch, model), plain, shared_outcome(model, batch), wide


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_text", "mixtral"])
def test_no_gradient_hides_behind_another_in_16_bits(name):
    comparison, plain, shared, wide = sixteen_bit(name)
    assert all(d.equal for d in comparison.differences(plain, shared, wide))
    for parameter, gradient in shared.gradients.items():
        for factor in (0, -1):
            broken = replace(shared, gradients={**shared.gradients, parameter: factor * gradient})
            (found,) = (d for d in comparison.differences(plain, broken, wide) if not d.equal)
            assert (found.quantity, found.where) == ("gradients", parameter)


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_values_in_16_bits(name):
    """A token that went to another expert by a near-tie is no fault; many tokens that are off are one."""
    comparison, plain, shared, wide = sixteen_bit(name)
    log_probs = shared.values["log_probs"]
    for far, equal in ((1, name == "mixtral"), (len(log_probs) // 2, False)):
        moved = log_probs.clone()
        moved[:far] += 0.5
        broken = replace(shared, values={**shared.values, "log_probs": moved})
        assert all(d.equal for d in comparison.differences(plain, broken, wide)) is equal
    log_probs[0] = torch.nan
    assert not all(d.equal for d in comparison.differences(plain, shared, wide))


def test_what_runs_out_of_memory_is_no_difference(saved, monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 MiB")

    monkeypatch.setattr(verify, "shared_outcome", fail)
    result = command(saved("qwen3"), "--dtype", "float32", *SMALL, WHOLE)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "it could not be done here (OutOfMemoryError: CUDA out of memory. Tried" in line


def test_a_seam_that_ignores_temperature_is_not_equal(saved, monkeypatch):
    ignored = lambda plan, labels, temperature, **others: SharedPrompt(plan, labels, 1.0, **others)  # noqa: E731
    monkeypatch.setattr(equivalence, "SharedPrompt", ignored)
    for how in (WHOLE, LAYERS):
        assert command(saved("qwen3"), "--dtype", "float32", *SMALL, how).exit_code == 1


# Layer by layer.


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("smollm3", {}),
        ("qwen3_moe", {"tie_word_embeddings": True}),
        ("qwen2_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}),
        ("qwen3_5_moe", {}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_layers_one_by_one_are_the_model(saved, name, config):
    """The chain of layers ends in the whole model's own values: each was loaded as what it is."""
    folder = saved(name, shard="20KB", **config)
    loaded_config = config_of(folder)
    batch = ragged_batch(torch.arange(1, 57), Sizes(7, 9, 5))
    layers = LayeredCheckpoint(folder, loaded_config, skeleton(loaded_config), torch.float64, "cpu")
    assert len(layers.files) > 1, "the checkpoint is in several files"
    hidden = None
    for layer in range(layers.num_layers):
        differences, hidden = compare_layer(layers, layer, batch, hidden, [Sharing()], None)
        assert all(d.equal for d in differences), differences
    model = load(folder, loaded_config, torch.float64, "cpu")
    expected = []
    hook = model.get_decoder().layers[-1].register_forward_hook(lambda module, args, out: expected.append(out[0]))
    bounds = batch.rows.cu_seqlens.tolist()
    for start, stop in zip(bounds, bounds[1:], strict=False):
        model(batch.rows.tokens[None, start:stop], use_cache=False)
    hook.remove()
    torch.testing.assert_close(hidden, torch.cat(expected).detach(), atol=1e-5, rtol=1e-6)
    wrong = torch.cat(expected).roll(1, 0)
    assert (hidden - wrong).abs().max() > 0.1, "hidden states of tokens differ"


def test_a_layer_in_the_middle_comes_alone(saved):
    folder = saved("qwen3_5_moe")
    config = config_of(folder)
    layers = LayeredCheckpoint(folder, config, skeleton(config), torch.float64, "cpu")
    whole = sum(p.numel() for p in layers.whole.get_decoder().layers[1].parameters())
    model = layers.load(1, with_ends=False)
    size = sum(p.numel() for name, p in model.named_parameters() if "visual" not in name)
    assert size == whole + 3 * config.get_text_config().hidden_size, "a norm, and one word in embedding and head"
    assert config.get_text_config().num_hidden_layers == 3, "the checkpoint's own config is untouched"


@pytest.mark.parametrize("how", [WHOLE, LAYERS])
def test_lacking_tensors_are_named(saved, tmp_path, how):
    """The loader would fill them with random values, which both sides would agree on."""
    folder = saved("qwen3")
    tensors = load_file(Path(folder, "model.safetensors"))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(Path(folder, "config.json").read_text())
    result = command("--model", tmp_path, "--dtype", "float64", how)
    assert result.exit_code == 2
    assert re.search(r"lacks model\.layers\.1\.mlp\.up_proj\.weight$", result.output.strip())


@pytest.mark.parametrize(("free", "expected"), [(1 << 40, False), (1 << 16, True)])
def test_memory_decides(saved, monkeypatch, free, expected):
    monkeypatch.setattr(verify, "free_memory", lambda device: free)
    _, report = report_of(saved("qwen3"), "--dtype", "float64", *SMALL)
    assert report["layer_by_layer"] is expected
    code, report = report_of(saved("qwen3"), "--dtype", "float64", *SMALL, WHOLE)
    assert (code, report["layer_by_layer"]) == (0, False)


# The batch.


@pytest.mark.parametrize("rows", [7, 10, 12, 25])
def test_the_batch_is_ragged(rows):
    batch = ragged_batch(torch.arange(5, 500), Sizes(rows, 20, 6), seed=rows)
    plan, prompts, responses = batch.plan, batch.rows.prompt_lens, batch.rows.response_lens
    sizes = sorted(plan.group_index.bincount().tolist())
    assert sum(sizes) == batch.rows.num_rows == rows
    assert sizes[0] == 1
    assert all(size >= 3 for size in sizes[1:])
    assert len(sizes) >= 3
    assert {1, 20} <= set(prompts.tolist())
    assert {0, 1, 6} <= set(responses.tolist())
    assert (int(batch.rows.tokens.min()), int(batch.rows.tokens.max())) >= (5, 0)
    assert plan.group_index.tolist() != sorted(plan.group_index.tolist()), "groups are not adjacent"


def test_the_one_token_group_is_a_group():
    batch = ragged_batch(torch.arange(5, 500), Sizes())
    one = [int(g) for g, n in zip(batch.plan.group_index, batch.rows.prompt_lens, strict=True) if n == 1]
    assert len(one) == 3
    assert len(set(one)) == 1


def test_placeholders_are_not_text():
    ids = text_tokens(tiny_models.config_of("qwen3_5"))
    assert ids.tolist() == list(range(1, 57)), "0 is padding, 57 to 60 stand for images"


def test_seeds_change_the_batch():
    first, again, other = (ragged_batch(torch.arange(60), Sizes(), seed).rows.tokens for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert first.shape != other.shape or not torch.equal(first, other)


def test_the_outcome_of_a_model_has_every_parameter(saved):
    model = tiny_models.build("qwen3_moe")
    batch = ragged_batch(torch.arange(1, 61), Sizes(prompt=9, response=5))
    plain = plain_outcome(model, batch)
    with Sharing().on(model):
        shared = shared_outcome(model, batch)
    assert plain.gradients.keys() == shared.gradients.keys() == dict(model.named_parameters()).keys()
    assert "forward" not in vars(model), "nothing of the seam is left"
    assert all(parameter.grad is None for parameter in model.parameters())


# Mistakes.


def gpt2(folder):
    AutoConfig.for_model("gpt2", n_layer=1, n_head=1, n_embd=8, vocab_size=9).save_pretrained(folder)


def config_alone(folder):
    tiny_models.config_of("qwen3").save_pretrained(folder)


def broken_json(folder):
    (folder / "config.json").write_text('{"model_type": ')


def empty_config(folder):
    (folder / "config.json").write_text("{}")


def unknown_type(folder):
    (folder / "config.json").write_text('{"model_type": "nobody"}')


def own_code(folder):
    config = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))


def odd_size(folder):
    (folder / "config.json").write_text('{"model_type": "qwen3", "hidden_size": "large"}')


def no_heads(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_attention_heads": 0}))


def odd_rope(folder):
    rope = {"rope_type": "nope", "rope_theta": 1.0}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "rope_parameters": rope}))


def pickled(folder):
    config_alone(folder)
    torch.save({}, folder / "pytorch_model.bin")


def truncated(folder):
    tiny_models.build("qwen3").save_pretrained(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def wrong_shape(folder):
    changed(folder, "qwen3", "model.layers.1.self_attn.q_norm.weight", lambda tensor: torch.ones(9))


def wrong_expert(folder):
    changed(folder, "qwen3_moe", "model.layers.0.mlp.experts.1.up_proj.weight", lambda tensor: tensor[1:])


def not_a_number(folder):
    changed(folder, "qwen3", "model.layers.1.self_attn.q_norm.weight", lambda tensor: tensor * torch.nan)


def changed(folder, name, key, change):
    """A checkpoint with one tensor that is another."""
    tiny_models.build(name).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[key] = change(tensors[key])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def no_config(folder):
    (folder / "model.safetensors").write_text("")


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (gpt2, (), "model_type: .*'gpt2'"),
        (no_config, (), "model: expected a checkpoint folder with a config.json"),
        (config_alone, (WHOLE,), "model: .*no file named model.safetensors"),
        (config_alone, (LAYERS,), "model: expected model.safetensors .* got no weights$"),
        (config_alone, ("--rows", 6), "rows: expected at least 7"),
        (config_alone, ("--prompt", 1), "prompt, response: expected at least 2 and 1"),
        (config_alone, ("--attn-implementation", "flash_attention_3"), "attn_implementation=flash_attention_3"),
        (config_alone, ("--attn-implementation", "fast"), "attn_implementation: expected one of .*'fast'"),
        (config_alone, ("--device", "tpu"), "device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (pickled, (LAYERS,), "got pytorch_model.bin, which is read by --whole only"),
        (broken_json, (), "model: expected JSON in .*config.json, got what can't be read .*line 1"),
        (empty_config, (), "model: expected a model_type in .*config.json, got none"),
        (unknown_type, (), r"model: the config of .* can't be used .*model type `nobody` .* this architecture\)$"),
        (own_code, (), "^zorro-verl verify: model: the config of .* contains custom code"),
        (odd_size, (), "model: the config of .* can't be used .*hidden_size"),
        (no_heads, (), "model: no model can be built from its config .*ZeroDivisionError"),
        (odd_rope, (), "model: no model can be built from its config .*'nope'"),
        (truncated, (WHOLE,), "model: the weights can't be loaded .*SafetensorError"),
        (truncated, (LAYERS,), r"model: \S+model.safetensors can't be read .*SafetensorError"),
        (wrong_shape, (WHOLE,), r"expected model\.layers\.1\.self_attn\.q_norm\.weight of shape \(8,\), got \(9,\)$"),
        (wrong_shape, (LAYERS,), r"expected model\.layers\.1\.self_attn\.q_norm\.weight of shape \(8,\), got \(9,\)$"),
        (wrong_expert, (WHOLE,), "model: the weights can't be loaded .*RuntimeError"),
        (not_a_number, (WHOLE,), r"unpatched model gives values that are not finite \(log_probs\)"),
        (not_a_number, (LAYERS,), r"unpatched model gives values that are not finite \(layer 1, log_probs\)"),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_a_mistake_is_one_line(tmp_path, make, arguments, message):
    with quiet_loading():
        make(tmp_path)
    result = command("--model", tmp_path, *arguments)
    assert result.exit_code == 2, result.output
    assert re.search(message, result.output, re.IGNORECASE), result.output
    assert len(result.output.strip().splitlines()) == 1
    assert result.output.startswith("zorro-verl verify: ")


def test_a_missing_folder_is_one_line(tmp_path):
    result = command("--model", tmp_path / "nothing")
    assert result.exit_code == 2
    assert result.output == (
        f"zorro-verl verify: model: expected a checkpoint folder with a config.json, got '{tmp_path}/nothing'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing/at/all",), "model: expected a checkpoint folder with a config.json, got 'nothing/at/all'"),
        ((), "model: expected one checkpoint, as MODEL or as --model MODEL"),
        (("some/name", "--model", "some/name"), "model: expected one checkpoint, as MODEL or as --model MODEL"),
        (("some/name", "--device", "gpu"), "device: expected cpu, cuda or cuda:N, got 'gpu'"),
        (("some/name", "--rows", "3"), "rows: expected at least 7 (groups of three, three and one), got 3"),
        (("some/name", "--dtype", "int8"), "Error: Invalid value for '--dtype'"),
        (("some/name", "--linear-attention", "x"), "Error: Invalid value for '--linear-attention'"),
    ],
)
def test_what_needs_no_torch_is_checked_without(arguments, message):
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from zorro_verl.cli import app; app(['verify', *sys.argv[1:]])"
    )
    finished = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 2, finished.stderr
    last = finished.stderr.splitlines()[-1]
    assert message in last if message.startswith("Error") else last == f"zorro-verl verify: {message}"


def test_a_hub_without_network_is_asked_once(monkeypatch):
    asked = []

    def ask(url):
        asked.append(url)
        raise httpx.ConnectError("no such host")

    monkeypatch.setattr(checkpoint, "try_to_load_from_cache", lambda *names: None)
    monkeypatch.setattr(checkpoint, "get_hf_file_metadata", ask)
    result = command("some/name")
    assert (result.exit_code, len(asked)) == (2, 1)
    assert result.output == (
        "zorro-verl verify: model: expected a checkpoint folder or a name on a hub that can be reached, "
        "got 'some/name' (no such host)\n"
    )


def test_an_interrupt_is_no_verdict(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "verify", interrupted)
    result = command("some/name")
    assert (result.exit_code, result.output) == (130, "zorro-verl verify: interrupted\n")
