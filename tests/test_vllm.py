"""veRL's trainer with real vLLM as its rollout, on a CPU, in the environment that `make setup-vllm` makes."""

import contextlib
import time
import types
import uuid

import psutil
import pytest
import tomllib
from tiny import tiny_model
from tiny_run import logged_steps, make_material, overrides, run_trainer
from trainer_process import RUN_MARK, processes_marked
from transformers import AutoConfig
from vllm_cpu import setup
from vllm_cpu.plugin import zorro_vllm_cpu

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = [
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.dtype=float32",
    f"{ROLLOUT}.enforce_eager=True",
    f"{ROLLOUT}.free_cache_engine=False",
    f"++{ROLLOUT}.enable_sleep_mode=False",
    f"{ROLLOUT}.max_model_len=128",
    f"{ROLLOUT}.max_num_seqs=16",
    f"{ROLLOUT}.calculate_log_probs=True",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=1",
]
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture
def python():
    """The Python that has vLLM."""
    if not setup.in_order():
        pytest.skip("needs `make setup-vllm`")
    return setup.PYTHON


@pytest.fixture
def material(tmp_path):
    """The tiny model with heads of a size that vLLM has a kernel for, and weights that need several buckets."""
    make_material(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    same = {name: getattr(config, name) for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    sizes = {"hidden_size": 64, "head_dim": 64, "intermediate_size": 1024}
    tiny_model(dtype=None, **sizes, **same).float().save_pretrained(tmp_path / "model")
    return tmp_path


@pytest.fixture
def mark():
    """A mark for the processes of a run; whatever carries it at the end of the test is ended."""
    mark = uuid.uuid4().hex
    yield mark
    for process in processes_marked(mark):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            process.kill()


def fail_with_vllm(session, output):
    """For `run_trainer`: veRL waits forever for a vLLM that has failed."""
    if "EngineCore encountered a fatal error" in output:
        pytest.fail(output[-5000:])


@pytest.mark.ray
@pytest.mark.timeout(660)
def test_vllm_rolls_out_with_the_weights_of_every_update(python, material, mark):
    arguments = [
        *overrides(material, "zorro", steps=3, ranks=1),
        *VLLM,
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]
    variables = VARIABLES | {RUN_MARK: mark}
    code, output = run_trainer(arguments, material, 600, meanwhile=fail_with_vllm, python=python, variables=variables)
    assert code == 0, output[-5000:]
    steps = logged_steps(output)
    assert len(steps) == 3
    for step in steps:
        assert step["zorro/token_ratio"] == step["zorro/token_ratio_best"] > 1
        # vLLM scores a token when it draws it, the actor afterwards: two programs, the same weights.
        assert step["training/rollout_probs_diff_max"] < 5e-6
    # The agreement says something of the updates only because they moved the policy.
    assert steps[0]["actor/kl_loss"] == 0
    assert all(step["actor/kl_loss"] > 0.1 for step in steps[1:])
    deadline = time.monotonic() + 30
    while (left := processes_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left


def test_the_alias_and_the_plugin_are_of_the_vllm_that_is_installed():
    version = setup.wanted()["vllm-cpu"]
    needs = f"vllm-cpu=={version}"
    projects = (setup.FOLDER / name / "pyproject.toml" for name in ("alias", "plugin"))
    alias, plugin = (tomllib.loads(project.read_text())["project"] for project in projects)
    assert alias["version"] == f"{version}+cpu"
    assert needs in alias["dependencies"]
    assert needs in plugin["dependencies"]


def test_a_vllm_that_packs_otherwise_is_refused():
    other = types.ModuleType("utils")
    other.dispatch_cpu_unquantized_gemm = lambda layer: None
    with pytest.raises(ValueError, match=r"its parameters are \('layer',\)"):
        zorro_vllm_cpu.keep_weights(other)
