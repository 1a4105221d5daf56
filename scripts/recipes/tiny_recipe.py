"""`make recipe`: a recipe in its tiny form, really run on this machine's CPU.

    make recipe RECIPE=recipes/grpo_qwen3_0.6b_gsm8k.sh
    STRATEGY=fsdp2 STEPS=4 make recipe RECIPE=recipes/grpo_qwen3_0.6b_gsm8k.sh

The recipe's own script runs, and before it the preparation that its head names. What is made small: the model (random,
of the recipe's type, a token a character), the data set (invented, in the public one's format), lengths, batches and
ranks. Generation is the CPU runtime's. The rest is the recipe's: algorithm, losses, critic, trainer mode, offload.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SCRIPTS))  # what several programs share

import recipe as recipes  # noqa: E402
import samples  # noqa: E402
import tiny_models  # noqa: E402
import tiny_tokenizer  # noqa: E402
import torch  # noqa: E402
import trainer_process  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from run_log import Record  # noqa: E402
from terminal import interrupt_once  # noqa: E402

SAMPLES = {"gsm8k": samples.write_gsm8k, "text_to_sql": samples.write_bird, "long_context_qa": samples.write_docqa}
PROMPT_TOKENS, RESPONSE_TOKENS = 4096, 16
PROMPTS = 4  # of an optimizer step
HEADS = 4


@dataclass(frozen=True)
class TinyForm:
    """One recipe made small, and where its files go."""

    recipe: Path
    folder: Path
    strategy: str = "zorro"
    steps: int = 2
    nodes: int = 1
    ranks: int = 2  # of a node

    @property
    def run_folder(self) -> trainer_process.RunFolder:
        return trainer_process.RunFolder(self.folder / self.strategy)

    @property
    def material(self) -> Path:
        return self.folder / "material"

    @property
    def variables(self) -> Mapping[str, str]:
        """What the recipe reads from its environment."""
        return {
            "STRATEGY": self.strategy,
            "MODEL": str(self.material / "model"),
            "CRITIC_MODEL": str(self.material / "model"),
            "DATA": str(self.material / "data"),
            "OUT": str(self.run_folder.path),
            "PYTHON": sys.executable,
            "NNODES": str(self.nodes),
            "GPUS_PER_NODE": str(self.ranks),
        }

    def prepare(self) -> None:
        """Writes the model, a data set in the public format, and by the recipe's preparation veRL's files of it.

        Raises:
            subprocess.CalledProcessError: the preparation ended with an error.
        """
        shutil.rmtree(self.material, ignore_errors=True)
        model = self.material / "model"
        tokenizer = tiny_tokenizer.build()
        tokenizer.save_pretrained(model)
        model_type = "qwen3_moe" if "_a3b_" in self.recipe.name else "qwen3"
        tiny_models.build(
            model_type,
            torch.float32,
            num_attention_heads=HEADS,
            max_position_embeddings=2 * PROMPT_TOKENS,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ).save_pretrained(model)
        _, script, *options = recipes.preparation(self.recipe)
        source = self.material / "source"
        SAMPLES[Path(script).stem](source)
        places = {"--source": source, "--out": self.material / "data", "--tokenizer": model}
        for name in places:
            if name in options:
                options[options.index(name) + 1] = str(places[name])
        subprocess.run([sys.executable, str(recipes.RECIPES.parent / script), *options], check=True)

    def overrides(self) -> list[str]:
        """What is set behind the recipe's own settings."""
        own = recipes.settings(recipes.command_line(self.recipe, self.variables))
        actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
        updates = min(2, int(own["data.train_batch_size"]) // int(own[f"{actor}.ppo_mini_batch_size"]))
        float32 = [
            f"++actor_rollout_ref.{role}.fsdp_config.mixed_precision.{kind}_dtype=fp32"
            for role in ("actor", "ref")
            for kind in ("param", "reduce", "buffer")
        ]
        sequence_parallel = [
            f"{key}={min(2, int(value))}"
            for key, value in own.items()
            if key.endswith("ulysses_sequence_parallel_size") and value.isdigit()  # else it is another key's
        ]
        reward = own.get("reward.custom_reward_function.path", "")
        result = [
            # data
            f"data.train_batch_size={PROMPTS * updates}",
            f"{actor}.ppo_mini_batch_size={PROMPTS}",
            f"data.max_prompt_length={PROMPT_TOKENS}",
            f"data.max_response_length={RESPONSE_TOKENS}",
            "data.dataloader_num_workers=0",
            "data.seed=1",
            # reward
            f"reward.custom_reward_function.path={Path(__file__).with_name('tiny_reward.py')}",
            f"++reward.custom_reward_function.reward_kwargs.recipe_reward={reward or 'null'}",
            "reward.num_workers=1",
            # model
            f"{actor}.optim.lr=1e-3",
            *float32,
            *sequence_parallel,
            # rollout
            f"{rollout}.name=hf",
            f"{rollout}.dtype=float32",
            f"{rollout}.tensor_model_parallel_size=1",
            f"{rollout}.max_model_len={PROMPT_TOKENS + RESPONSE_TOKENS}",
            f"{rollout}.agent.num_workers=1",
            # trainer
            "trainer.device=cpu",
            f"trainer.nnodes={self.nodes}",
            f"trainer.n_gpus_per_node={self.ranks}",
            f"trainer.total_training_steps={self.steps}",
            f"trainer.total_epochs={self.steps}",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.resume_mode=disable",
            "trainer.logger=[console,file]",
            f"trainer.rollout_data_dir={self.run_folder.rollouts}",
            "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
            f"hydra.run.dir={self.run_folder.path}",
        ]
        if own.get("critic.strategy"):
            result += [f"critic.ppo_mini_batch_size={PROMPTS}", "critic.optim.lr=1e-3", "trainer.critic_warmup=0"]
            result += [f"++critic.fsdp.mixed_precision.{kind}_dtype=fp32" for kind in ("param", "reduce", "buffer")]
        mode = own.get("trainer.v1.trainer_mode", "sync")
        result += [
            "trainer.v1.sampler.custom_sampler.path=pkg://zorro_verl.cpu_runtime.replay",
            f"trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer{'' if mode == 'sync' else 'Async'}",
        ]
        if mode == "separate_async":
            result += [
                f"trainer.v1.separate_async.parameter_sync_step={updates}",
                f"{rollout}.nnodes=1",
                f"{rollout}.n_gpus_per_node=1",
                f"{rollout}.checkpoint_engine.backend=gloo",
            ]
        if self.strategy == "fsdp2":
            result += ["actor_rollout_ref.model.use_fused_kernels=False"]  # veRL's need an accelerator
        return result

    def run(self, on_record, *arguments: str) -> list[Record]:
        """Runs the prepared recipe to its end in a Ray of its own.

        Args:
            on_record: called with each step's metrics.
            arguments: set behind all others.

        Raises:
            trainer_process.TrainerFailed: veRL ended with an error.
        """
        with trainer_process.temporary_ray_folder() as ray_folder:
            ray_init = "++ray_kwargs.ray_init"
            own_ray = [f"{ray_init}.address=local", f"{ray_init}._temp_dir={ray_folder}"]
            own_ray += [f"{ray_init}.object_store_memory={512 * 2**20}"]
            command = ["bash", str(self.recipe), *self.overrides(), *own_ray, *arguments]
            return trainer_process.run(command, self.run_folder, on_record, variables=self.variables)


def progress_line(record: Record, steps: int) -> str:
    """One step: reward, token ratio, groups that were cut, seconds."""
    values = record.values
    line = f"step {record.step}/{steps}  reward {record.reward:.3f}  {record.seconds:.1f} s"
    if "zorro/token_ratio" in values:
        line += f"  zorro/token_ratio {values['zorro/token_ratio']:.2f} of {values['zorro/token_ratio_best']:.2f}"
        line += f"  zorro/groups_split {values['zorro/groups_split']:.0f}"
    return line


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    variables = os.environ
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="one of recipes/*.sh")
    parser.add_argument(
        "--strategy",
        default=variables.get("STRATEGY", "zorro"),
        help="zorro or fsdp2; also STRATEGY=",
    )
    parser.add_argument("--steps", type=int, default=variables.get("STEPS", "2"), help="also STEPS=")
    parser.add_argument("--out", type=Path, default=Path("outputs/tiny"), help="a folder; each recipe gets one in it")
    options, others = parser.parse_known_args(argv)
    options.others = others
    if options.strategy not in ("zorro", "fsdp2"):
        parser.error(f"STRATEGY: expected zorro or fsdp2, got {options.strategy}")
    if not options.recipe.is_file():
        names = ", ".join(str(each.name) for each in recipes.every())
        parser.error(f"expected a recipe, one of {names} in recipes/, got {options.recipe}")
    if options.steps < 1:
        parser.error(f"STEPS must be at least 1, got {options.steps}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        complaints = recipes.complaints(options.recipe)
    except (HydraException, ValueError) as error:  # a key that veRL doesn't know, a recipe that doesn't come to an end
        print(f"{options.recipe}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    for complaint in complaints:
        print(f"{options.recipe}: {complaint}", file=sys.stderr)
    form = TinyForm(
        options.recipe.resolve(), (options.out / options.recipe.stem).resolve(), options.strategy, options.steps
    )
    try:
        form.prepare()
    except subprocess.CalledProcessError as error:
        print(f"the preparation that {form.recipe.name} names ended with exit code {error.returncode}", file=sys.stderr)
        return 1
    print(f"{form.recipe.name} with strategy={form.strategy} on a CPU: a minute until its first step")
    print(f"All that it prints is in {form.run_folder.log}", flush=True)
    try:
        form.run(lambda record: print(progress_line(record, form.steps), flush=True), *options.others)
    except trainer_process.TrainerFailed as error:
        print(f"\n{str(error).splitlines()[-1]}\nThe rest is in {form.run_folder.log}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    interrupt_once()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; all processes have been ended", file=sys.stderr)
        sys.exit(130)
