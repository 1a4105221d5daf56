"""Checkpoints of the engine: another goes on from one, with either strategy, and Hugging Face loads one alone."""

import itertools
import json
from typing import NamedTuple

import pytest
import tiny_models
import torch
from fresh_process import run_python
from ranks import run_ranks
from test_engine import TOLERANCE, build_engine, local_rows, ppo_loss_function, ragged_batch, responses
from tiny import verl_batch

pytestmark = pytest.mark.timeout(450)  # much happens between two ranks, and slowly where others want the cores

# The folders of what each strategy writes. Whatever says zorro in one is a trace of this package.
FOLDERS = {"fsdp2": "stock", "zorro": "shared"}
WITH_HF_MODEL = {"save_contents": ["model", "optimizer", "extra", "hf_model"]}


class Case(NamedTuple):
    """A model type, what is asked of its engine beside that, and what its checkpoints hold."""

    model_type: str
    model: dict = {}
    contents: dict = {}


CASES = {
    "dense": Case("qwen3", contents=WITH_HF_MODEL),
    "vision": Case("qwen3_5", contents=WITH_HF_MODEL),
    "experts": Case("qwen3_next", contents=WITH_HF_MODEL),
    "lora": Case("qwen3", {"lora_rank": 4, "lora_alpha": 8}),
    "adapter": Case("qwen3", {"lora_rank": 4, "lora_alpha": 8}, {"save_lora_only": True}),
}


def build(path, strategy, case, **contents):
    """An engine with another learning rate in each step, so that a schedule that starts anew is seen."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig

    engine = build_engine(path, strategy, model=case.model)
    engine.optimizer_config = FSDPOptimizerConfig(lr=1e-3, lr_scheduler_type="cosine", total_training_steps=8)
    engine.checkpoint_config = CheckpointConfig(**case.contents | contents)
    engine.initialize()
    return engine


def train(engine, seed):
    """One step of optimizer and schedule -> its loss, gradient norm and learning rate."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows = local_rows(ragged_batch(), rank, world_size)
    data = verl_batch(rows, seed=seed + rank, use_remove_padding=False, global_batch_size=len(rows) * world_size)
    with engine.train_mode():
        output = engine.train_batch(data, ppo_loss_function())
        lr = engine.lr_scheduler_step()
    return [sum(output["loss"]), output["metrics"]["grad_norm"], lr]


def score(engine):
    """The log-probs of every row, all of them on every rank."""
    data = verl_batch(ragged_batch(), use_remove_padding=False)
    with engine.eval_mode():
        return responses(engine.infer_batch(data)["model_output"]["log_probs"], data)


def parameters(engine):
    return {name: value.full_tensor().clone() for name, value in engine.module.state_dict().items()}


def largest_difference(expected, got):
    assert expected.keys() == got.keys()
    return max(float((expected[name] - got[name]).abs().max()) for name in expected)


def every_direction(rank, folder, names):
    """Each strategy saves after a step and goes on; each goes on from what each has saved."""
    torch.manual_seed(rank)
    for name, writer in itertools.product(names, FOLDERS):
        path, checkpoint, case = f"{folder}/{name}/model", f"{folder}/{name}/{FOLDERS[writer]}", CASES[name]
        engine = build(path, writer, case)
        fresh, first, saved = parameters(engine), train(engine, seed=1), parameters(engine)
        assert largest_difference(fresh, saved) > 25 * TOLERANCE, "a step changed nothing: the comparison is blind"
        rng = torch.get_rng_state()
        engine.save_checkpoint(checkpoint, global_step=1)
        scores, second, after = score(engine), train(engine, seed=2), parameters(engine)
        assert first[2] != second[2]
        if rank == 0:
            torch.save((saved, ragged_batch(), scores), f"{checkpoint}.pt")
        for reader in FOLDERS:
            which, tolerance = (name, writer, reader), 0 if reader == writer else TOLERANCE
            other = build(path, reader, case)
            other.load_checkpoint(checkpoint, del_local_after_load=False)
            assert torch.equal(torch.get_rng_state(), rng), which
            assert largest_difference(saved, parameters(other)) == 0, which
            assert train(other, seed=2) == pytest.approx(second, abs=tolerance, rel=0), which
            assert largest_difference(after, parameters(other)) <= tolerance, which
        other = build(path, writer, case, load_contents=["model"])
        other.load_checkpoint(checkpoint, del_local_after_load=False)
        train(other, seed=2)
        assert largest_difference(after, parameters(other)) > 5 * TOLERANCE, "the optimizer's state is not seen"


def make_models(folder, names):
    for name in names:
        tiny_models.build(CASES[name].model_type, torch.float32).save_pretrained(folder / name / "model")
    return folder


@pytest.mark.slow
def test_one_rank_goes_on_from_either_strategys_checkpoint(tmp_path):
    names = ("dense", "adapter")
    run_ranks(every_direction, 1, str(make_models(tmp_path, names)), names)


# The package can't be imported, as where it is not installed. Weights are read as they are, merged or saved by verl.
ALONE = """
    import os, runpy, sys
    from pathlib import Path
    sys.modules["zorro_verl"] = None
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    def load(path, dtype):
        vision = hasattr(AutoConfig.from_pretrained(path), "vision_config")
        auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        return auto.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()

    for path in map(Path, os.environ["CHECKPOINTS"].split(":")):
        merged = path.with_name(f"{path.name}-merged")
        sys.argv = ["merger", "merge", "--backend=fsdp", f"--local_dir={path}", f"--target_dir={merged}"]
        runpy.run_module("verl.model_merger", run_name="__main__")
        model = load(merged, "auto")
        if (merged / "lora_adapter").exists():
            from peft import PeftModel
            model = PeftModel.from_pretrained(model, merged / "lora_adapter")
        found = {"merged": model.state_dict()}
        if (path / "huggingface" / "model.safetensors").exists():
            model = load(path / "huggingface", torch.float32)
            found["saved"], found["scores"] = model.state_dict(), []
            for prompt, response in torch.load(path.with_name(f"{path.name}.pt"))[1]:
                with torch.no_grad():
                    logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
                found["scores"].append(logits.log_softmax(-1).gather(1, response[:, None])[:, 0])
        torch.save(found, path.with_name(f"{path.name}-found.pt"))
    print("CHECKED")
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of two ranks, from which others have gone on."""
    names = ("dense", "vision", "experts", "lora")
    folder = make_models(tmp_path_factory.mktemp("checkpoints"), names)
    run_ranks(every_direction, 2, str(folder), names, timeout=400)
    return {name: folder / name for name in names}


@pytest.mark.slow
def test_two_ranks_go_on_from_either_strategys_checkpoint(written):
    for path in written["lora"].glob("*/lora_train_meta.json"):
        assert json.loads(path.read_text()) == {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}


def config_of(folder):
    """What a folder's ``config.json`` says of the model; verl's merger writes bfloat16, and so says its dtype."""
    text = (folder / "config.json").read_text()
    skipped = ("dtype", "transformers_version")
    return json.loads(text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if k not in skipped})


@pytest.mark.slow
def test_hugging_face_loads_a_checkpoint_without_this_package(written):
    checkpoints = [folder / "shared" for folder in written.values()]
    for path in (path for checkpoint in checkpoints for path in checkpoint.rglob("*")):
        assert path.is_dir() or b"zorro" not in path.read_bytes(), path
    output = run_python(ALONE, CHECKPOINTS=":".join(map(str, checkpoints)))
    assert "CHECKED" in output, output
    for name, folder in written.items():
        parameters, _, scores = torch.load(folder / "shared.pt")
        found = torch.load(folder / "shared-found.pt")
        assert largest_difference({key: x.bfloat16() for key, x in parameters.items()}, found["merged"]) == 0, name
        assert config_of(folder / "shared-merged") == config_of(folder / "model"), name
        assert config_of(folder / "shared" / "huggingface") == config_of(folder / "model"), name
        assert ("saved" in found) == (name != "lora")
        if "saved" in found:
            assert largest_difference(parameters, found["saved"]) == 0, name
            for expected, got in zip(scores, found["scores"], strict=True):
                assert largest_difference({name: expected}, {name: got}) <= TOLERANCE
