"""verl's trainer, one worker of which is killed: it ends, goes on from its checkpoint, and computes what it would have.

Three runs of four steps: killed after its second, resumed from there, and never interrupted.
"""

import os
import signal
import time

import pytest
import torch
from fresh_process import run_python
from safetensors.torch import load_file
from tiny_run import logged_steps, make_material, overrides, run_trainer, worker_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(450)]

# Rows come in the order in which their rollouts end, so that sums over them differ in their last bits.
TOLERANCE = 2e-5
SAME = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "actor/lr", "actor/entropy")
SAME += ("critic/score/mean", "critic/rewards/mean", "response_length/mean", "training/rollout_probs_diff_max")


class KillWorker:
    """For `run_trainer`: ``kill -9`` of one worker as soon as a folder of checkpoints has its first.

    Attributes:
        pid: the worker's, None before.
        at: when it was killed, in seconds of `time.monotonic`.
    """

    def __init__(self, folder):
        self.complete, self.pid, self.at = folder / "latest_checkpointed_iteration.txt", None, None

    def __call__(self, session, output):
        if self.pid is None and self.complete.exists():
            self.pid, self.at = worker_of(session, "WorkerDict"), time.monotonic()
            os.kill(self.pid, signal.SIGKILL)


def steps_of(output):
    return {int(step["step"]): step for step in logged_steps(output) if "zorro/token_ratio" in step}


def flat_weights(folder):
    """All weights of a model's folder in one vector."""
    return torch.cat([x.flatten() for _, x in sorted(load_file(folder / "model.safetensors").items())])


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))


def arguments(material, name):
    """A learning rate that changes, and a rollout none of whose draws is decided by the rounding of bfloat16."""
    return [
        *overrides(material, "zorro", steps=4),
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        f"trainer.default_local_dir={material}/{name}",
        "trainer.resume_mode=auto",
    ]


@pytest.fixture(scope="module")
def killed(material):
    """The killer, the exit code and the output of a run that was killed."""
    kill = KillWorker(material / "killed")
    code, output = run_trainer([*arguments(material, "killed"), "trainer.save_freq=2"], material, 360, meanwhile=kill)
    return kill, time.monotonic(), code, output


@pytest.fixture(scope="module")
def resumed(material, killed):
    """The output of the same command again."""
    code, output = run_trainer([*arguments(material, "killed"), "trainer.save_freq=2"], material, 360)
    assert code == 0, output[-4000:]
    return output


def test_a_run_ends_and_says_so_when_a_worker_is_killed(material, killed):
    kill, ended, code, output = killed
    assert {1} <= steps_of(output).keys() <= {1, 2, 3}, output[-4000:]
    assert code == 1
    assert ended - kill.at < 120
    assert "ActorDiedError" in output
    assert f"pid: {kill.pid}" in output
    assert (material / "killed" / "latest_checkpointed_iteration.txt").read_text() == "2"


ALONE = """
    import os, runpy, sys
    sys.modules["zorro_verl"] = None  # can't be imported, as where it is not installed
    actor, merged = os.environ["ACTOR"], os.environ["MERGED"]
    sys.argv = ["merger", "merge", "--backend=fsdp", f"--local_dir={actor}", f"--target_dir={merged}"]
    runpy.run_module("verl.model_merger", run_name="__main__")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokens = AutoTokenizer.from_pretrained(merged)("12+3=", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert model.generate(tokens, max_new_tokens=4, do_sample=False).shape[1] > tokens.shape[1] == 5
    torch.save(model.state_dict(), f"{merged}/state.pt")
    print("CHECKED")
"""


def test_its_last_checkpoint_loads_without_this_package(material, resumed):
    actor, merged = material / "killed" / "global_step_4" / "actor", material / "merged"
    assert "CHECKED" in run_python(ALONE, ACTOR=str(actor), MERGED=str(merged))
    found, gathered = torch.load(merged / "state.pt"), load_file(actor / "huggingface" / "model.safetensors")
    assert found.keys() == gathered.keys()
    assert all(torch.equal(found[name], gathered[name].bfloat16()) for name in found)


def test_a_resumed_run_computes_what_an_uninterrupted_one_does(material, killed, resumed):
    code, output = run_trainer([*arguments(material, "whole"), "trainer.save_freq=4"], material, 360)
    assert code == 0, output[-4000:]
    whole, before, after = steps_of(output), steps_of(killed[-1]), steps_of(resumed)
    assert (list(whole), list(after)) == ([1, 2, 3, 4], [3, 4])
    for number, step in (before | after).items():
        expected = whole[number]
        for name in SAME:
            assert step[name] == pytest.approx(expected[name], abs=TOLERANCE), (number, name)
        timed = ("mfu_executed", "throughput_executed")
        counts = [name for name in expected if name.startswith("zorro/") and not name.endswith(timed)]
        assert {name: step[name] for name in counts} == {name: expected[name] for name in counts}, number
    assert len({step["actor/lr"] for step in whole.values()}) == 4
    first, last, expected = (
        flat_weights(material / folder)
        for folder in ("model", *(f"{run}/global_step_4/actor/huggingface" for run in ("killed", "whole")))
    )
    # Adam makes steps of one size of gradients of all sizes, of mere rounding, too: hence over all weights together.
    assert (last - expected).norm() < 1e-4 * (expected - first).norm()
