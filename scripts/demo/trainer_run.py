"""The demo's run of veRL's trainer: what it trains, and its command line."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from run_log import Record
from trainer_process import RunFolder, run, temporary_ray_folder


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


def train(
    strategy: str,
    settings: Settings,
    material: Path,
    folder: RunFolder,
    on_record: Callable[[Record], None],
    enough: Callable[[list[Record]], bool] = lambda records: False,
) -> list[Record]:
    """Runs the trainer to its end, or until `enough` says so; every process that it started is gone afterwards."""
    with temporary_ray_folder() as ray_folder:
        command = [sys.executable, "-m", "verl.trainer.main_ppo"]
        command += overrides(strategy, settings, material, folder, ray_folder)
        return run(command, folder, on_record, enough)
