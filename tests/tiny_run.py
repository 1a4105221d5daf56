"""Material for a real run of verl's trainer in seconds: a character tokenizer, a two-layer Qwen3, parquet, a reward."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas
import tiny_models
import tiny_tokenizer
import torch
from tiny import tiny_model

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """The share of digits in the answer: dense enough for a random model."""
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
'''


def make_material(folder, model_type="qwen3"):
    """``model/`` of a type, ``train.parquet``, ``val.parquet`` and ``reward.py`` in ``folder``."""
    fast = tiny_tokenizer.build()
    fast.save_pretrained(folder / "model")
    ids = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id, "vocab_size": len(fast)}
    if model_type == "qwen3":
        model = tiny_model(dtype=None, hidden_size=64, head_dim=16, **ids)
    else:
        model = tiny_models.build(model_type, torch.float32, **ids)
    model.float().save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = []
    for i in range(64):
        question = "x" * rng.randint(0, 20) + f"{rng.randint(1, 99)}+{rng.randint(1, 9)}="
        rows.append(
            {
                "data_source": "tiny",
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": i, "split": "train"},
            }
        )
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:8]).to_parquet(folder / "val.parquet")
    (folder / "reward.py").write_text(REWARD)
    return folder


def overrides(folder, strategy, steps=2, ranks=2):
    """GRPO with n=4 and a reference policy, as a user would write it for ``trainer.device=cpu``."""
    precision = [
        f"+actor_rollout_ref.{role}.fsdp_config.mixed_precision.{kind}_dtype=fp32"
        for role in ("actor", "ref")
        for kind in ("param", "reduce", "buffer")
    ]
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder}/model",
        f"actor_rollout_ref.actor.strategy={strategy}",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        *precision,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.nnodes=1",
        "trainer.logger=[console]",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
    ]


def run_trainer(arguments, folder, timeout=240, meanwhile=None, python=sys.executable, variables=None):
    """``python -m verl.trainer.main_ppo`` with ``arguments`` in a session of its own -> (exit code, output).

    ``meanwhile(session, output)`` is called ten times a second with the session's id and the output so far.
    ``variables`` are what the environment has besides, by name.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "RAY_"))}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    } | (variables or {})
    command = [python, "-m", "verl.trainer.main_ppo", *arguments, f"hydra.run.dir={folder}/hydra"]
    path = folder / "run.log"
    with open(path, "w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
        )
        try:
            code = _wait(process, timeout, path, meanwhile)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever of the run's Ray is left
    return code, path.read_text(errors="replace")


def _wait(process, timeout, log, meanwhile):
    if meanwhile is None:
        return process.wait(timeout)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        meanwhile(process.pid, log.read_text(errors="replace"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.1)
    raise subprocess.TimeoutExpired(process.args, timeout)


def worker_of(session, name):
    """The id of one Ray actor of class ``name`` among the processes of ``session``, which `run_trainer` started."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
            pid = int(folder.name)
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
            if os.getsid(pid) == session and title.startswith(f"ray::{name}"):
                return pid
    raise ValueError(f"session {session} has no process ray::{name}")


def logged_steps(output):
    """The metrics of each step that verl's console logger printed: ``step:1 - name:value - ...``."""
    steps = []
    for line in output.splitlines():
        start = line.find("step:")
        if start < 0 or " - " not in line[start:]:
            continue
        pairs = (part.rsplit(":", 1) for part in line[start:].split(" - "))
        steps.append({name: float(re.sub(r"np\.\w+\((.*)\)", r"\1", value)) for name, value in pairs})
    return steps
