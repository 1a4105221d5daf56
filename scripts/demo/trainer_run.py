"""One run of `python -m verl.trainer.main_ppo`: its command line, its processes from start to end, its files."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from run_log import MetricsFile, Record, last_error

RUN_MARK = "ZORRO_DEMO_RUN"


@dataclass(frozen=True)
class Settings:
    """The same for every strategy."""

    steps: int
    prompts: int = 16
    rollouts: int = 8
    ranks: int = 2
    learning_rate: float = 5e-4
    prompt_tokens: int = 512
    response_tokens: int = 8
    tokens_per_micro_batch: int = 3584
    validation_samples: int = 4


@dataclass(frozen=True)
class RunFolder:
    """Where one run leaves what it leaves."""

    path: Path

    @property
    def log(self) -> Path:
        return self.path / "console.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def validation(self) -> Path:
        return self.path / "validation"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


class TrainerFailed(RuntimeError):
    """main_ppo ended with an error; the message holds the end of its log."""


def overrides(strategy: str, settings: Settings, material: Path, folder: RunFolder, ray_folder: Path) -> list[str]:
    """What a user would type after `python -m verl.trainer.main_ppo`."""
    reward = Path(__file__).with_name("reward.py")
    actor, ref, rollout = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
    model, ray_init = "actor_rollout_ref.model", "ray_kwargs.ray_init"
    float32 = [
        f"+{role}.fsdp_config.mixed_precision.{kind}_dtype=fp32"
        for role in (actor, ref)
        for kind in ("param", "reduce", "buffer")
    ]
    return [
        f"{actor}.strategy={strategy}",
        # GRPO with a reference policy and an entropy bonus
        "algorithm.adv_estimator=grpo",
        f"{actor}.use_kl_loss=True",
        f"{actor}.kl_loss_coef=0.001",
        f"{actor}.entropy_coeff=0.0001",
        f"{actor}.optim.lr={settings.learning_rate}",
        f"{actor}.ppo_mini_batch_size={settings.prompts}",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu={settings.tokens_per_micro_batch}",
        # data
        f"data.train_files={material / 'train.parquet'}",
        f"data.val_files={material / 'validation.parquet'}",
        f"data.train_batch_size={settings.prompts}",
        f"data.max_prompt_length={settings.prompt_tokens}",
        f"data.max_response_length={settings.response_tokens}",
        "data.dataloader_num_workers=0",
        "data.seed=1",
        # reward
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={reward}",
        # model; a padded batch is the stock engine's faster way on a CPU, where packed attention needs a dense mask
        f"{model}.path={material / 'model'}",
        f"{model}.use_remove_padding=False",
        f"{model}.enable_gradient_checkpointing=True",
        *float32,
        # rollouts
        f"{rollout}.name=hf",
        f"{rollout}.dtype=float32",
        f"{rollout}.n={settings.rollouts}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.val_kwargs.do_sample=True",
        f"{rollout}.val_kwargs.temperature=1.0",
        f"{rollout}.val_kwargs.n={settings.validation_samples}",
        # trainer
        "trainer.device=cpu",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={settings.ranks}",
        f"trainer.total_training_steps={settings.steps}",
        f"trainer.total_epochs={settings.steps}",
        "trainer.val_before_train=True",
        f"trainer.test_freq={settings.steps}",
        f"trainer.save_freq={settings.steps}",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder.checkpoints}",
        f"trainer.rollout_data_dir={folder.rollouts}",
        f"trainer.validation_data_dir={folder.validation}",
        "trainer.logger=[console,file]",
        # verl's own replay buffer looks for finished rollouts every two seconds: longer than the rest of a step here
        "trainer.v1.sampler.custom_sampler.path=pkg://zorro_verl.cpu_runtime.replay",
        "trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"hydra.run.dir={folder.path}",
        # a Ray of its own, on this machine only
        f"+{ray_init}.address=local",
        f"+{ray_init}._temp_dir={ray_folder}",
        f"+{ray_init}.object_store_memory={512 * 2**20}",
    ]


def environment(folder: RunFolder, mark: str) -> dict[str, str]:
    """This process's environment without what would lead to another Ray cluster or to the network."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_NAMESPACE")}
    return inherited | {
        RUN_MARK: mark,
        "VERL_FILE_LOGGER_PATH": str(folder.metrics),
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "PYTHONUNBUFFERED": "1",
    }


def train(
    strategy: str,
    settings: Settings,
    material: Path,
    folder: RunFolder,
    on_record: Callable[[Record], None],
    enough: Callable[[list[Record]], bool] = lambda records: False,
) -> list[Record]:
    """Runs the trainer to its end, or until `enough` says so; every process that it started is gone afterwards."""
    shutil.rmtree(folder.path, ignore_errors=True)
    folder.path.mkdir(parents=True)
    ray_folder = short_temporary_folder()
    mark = uuid.uuid4().hex
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += overrides(strategy, settings, material, folder, ray_folder)
    records: list[Record] = []
    with folder.log.open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder.path,
            env=environment(folder, mark),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            for record in follow(process, MetricsFile(folder.metrics)):
                records.append(record)
                on_record(record)
                if enough(records):
                    return records
        finally:
            end(process, mark)
            shutil.rmtree(ray_folder, ignore_errors=True)
    if process.returncode != 0:
        raise TrainerFailed(
            f"main_ppo with strategy={strategy} ended with exit code {process.returncode}. The end of its log, all of "
            f"which is in {folder.log}:\n\n{last_error(folder.log)}"
        )
    return records


def follow(process: subprocess.Popen, metrics: MetricsFile) -> Iterator[Record]:
    """Records as they are written; ends when the process has ended."""
    while process.poll() is None:
        yield from metrics.new_records()
        time.sleep(0.2)
    yield from metrics.new_records()


def end(process: subprocess.Popen, mark: str) -> None:
    """Asks the trainer first, so that Ray takes its own down; then sweeps what still carries this run's mark."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    leftover = processes_marked(mark)
    for each in leftover:
        each.terminate()
    for each in psutil.wait_procs(leftover, timeout=5)[1]:
        each.kill()


def processes_marked(mark: str) -> list[psutil.Process]:
    """By the environment, which every descendant inherits: Ray's workers change their titles, sessions and parents."""
    return [each for each in psutil.process_iter() if has_mark(each, mark)]


def has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(RUN_MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def short_temporary_folder() -> Path:
    """Ray puts sockets under it, whose paths may not be longer than 107 bytes."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="zorro-", dir=base if len(base) < 30 else "/tmp"))
