"""Write the table of estimates in docs/recipes.md: what each recipe takes, computed from its own settings.

    python scripts/recipes/estimates.py            # rewrite the table
    python scripts/recipes/estimates.py --check    # exit code 1 if it is another

Prompts and responses have the longest lengths that a recipe allows. The package's README has no such figures: none of
this was measured.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import recipe as recipes
from omegaconf import DictConfig

from zorro_verl.estimate import ModelSize, shard_memory
from zorro_verl.known_models import config_of
from zorro_verl.memory import activation_memory
from zorro_verl.planning import GB, GIB, Question
from zorro_verl.prediction import Speed, predict

PAGE = recipes.RECIPES.parent / "docs" / "recipes.md"
BEGIN, END = "<!-- estimates, written by scripts/recipes/estimates.py -->", "<!-- end of the estimates -->"
SPEED = Speed(peak_tflops=989, utilisation=0.4)  # of an H100 or H200 in bfloat16, and what training reaches of it
_GPU = re.compile(r"(\d+) GB\b")


class Role(NamedTuple):
    """A model that is trained."""

    model: str
    sequence_parallel: int
    budget: int  # packed tokens of a micro-batch, per GPU
    mini_batch: int  # prompts of an optimizer step
    is_critic: bool
    keeps_weights: bool  # on the GPU while others use it, and likewise
    keeps_optimizer: bool


class Estimate(NamedTuple):
    """What a recipe takes; seconds are of one step, bytes of one GPU."""

    question: Question  # of the actor
    rollout_gpus: int  # that only sample
    stock_seconds: float
    shared_seconds: float
    state: int
    gathered: int
    activations: int
    rollout: float


def roles_of(config: DictConfig) -> list[Role]:
    """The actor, and the critic of a PPO recipe."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    roles = [
        Role(
            config.actor_rollout_ref.model.path,
            actor.ulysses_sequence_parallel_size,
            actor.ppo_max_token_len_per_gpu,
            actor.ppo_mini_batch_size,
            False,
            not actor.fsdp_config.param_offload,
            not actor.fsdp_config.optimizer_offload,
        )
    ]
    if config.algorithm.adv_estimator == "gae":
        roles.append(
            Role(
                critic.model.path,
                critic.fsdp.ulysses_sequence_parallel_size,
                critic.ppo_infer_max_token_len_per_gpu,
                critic.ppo_mini_batch_size,
                True,
                not critic.fsdp.param_offload,
                not critic.fsdp.optimizer_offload,
            )
        )
    return roles


def estimate(recipe: Path) -> Estimate:
    """From the recipe's settings, its head's words on GPUs, and the sizes of its models.

    Raises:
        ValueError: the recipe's head names no GPU memory, or what the estimates refuse.
    """
    config, stated = recipes.composed(recipe), _GPU.search(recipe.read_text())
    if stated is None:
        raise ValueError(f"{recipe}: expected the memory of a GPU in its head, such as '80 GB', got none")
    rollout, roles = config.actor_rollout_ref.rollout, roles_of(config)
    question = Question(
        prompt=config.data.max_prompt_length,
        response=config.data.max_response_length,
        n=rollout.n,
        prompts=config.data.train_batch_size,
        gpus=config.trainer.nnodes * config.trainer.n_gpus_per_node,
        hbm=int(stated[1]) * GB,
        sequence_parallel=roles[0].sequence_parallel,
        logits_optimization="memory",
        mini_batch=roles[0].mini_batch,
    )
    reference = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    stock = shared = 0.0
    training, resident = [], []
    for role in roles:
        model, head_features = config_of(role.model), 1 if role.is_critic else None
        options = {"checkpointing": True, "logits_optimization": "memory"}
        options |= {"sequence_parallel": role.sequence_parallel}
        forwards = 2 if reference and not role.is_critic else 1
        predicted = predict(
            model,
            question.lengths,
            ranks=question.gpus // role.sequence_parallel,
            budget=role.budget,
            mini_batches=question.prompts // role.mini_batch,
            head_features=head_features,
            ask_verl=False,
            **options,
        )
        stock, shared = (
            total + forwards * predicted.seconds(way.log_prob, SPEED) + predicted.seconds(way.update, SPEED)
            for total, way in zip((stock, shared), (predicted.stock, predicted.group_placed), strict=True)
        )
        shards = shard_memory(ModelSize.of(model, head_features), question.gpus)
        tokens = role.budget * role.sequence_parallel
        responses = round(tokens * question.n * question.response / question.group_tokens)
        activations = activation_memory(model, tokens, responses, head_features=head_features, **options).peak
        training.append((shards.weights + shards.gradients + shards.optimizer, shards.gathered, activations))
        resident.append(shards.weights * role.keeps_weights + shards.optimizer * role.keeps_optimizer)
    # One model trains at a time, beside what the others leave there.
    others = sum(resident)
    state, gathered, activations = max(
        ((own[0] + others - left, *own[1:]) for own, left in zip(training, resident, strict=True)), key=sum
    )
    separate = config.trainer.v1.trainer_mode == "separate_async"
    rollout_gpus = rollout.nnodes * rollout.n_gpus_per_node if separate else 0
    sampling = rollout.gpu_memory_utilization * question.hbm + others
    return Estimate(question, rollout_gpus, stock, shared, state, gathered, activations, sampling)


def row(recipe: Path) -> str:
    e = estimate(recipe)
    q = e.question
    total = e.state + e.gathered + e.activations
    memory = " + ".join(f"{part / GIB:.0f}" for part in (e.state, e.gathered, e.activations))
    cells = (
        f"[`{recipe.stem}`](../recipes/{recipe.name})",
        f"{q.gpus}{f' + {e.rollout_gpus}' if e.rollout_gpus else ''} x {q.hbm / GB:.0f} GB",
        f"{q.prompts} x {q.n}, {q.prompt} + {q.response}",
        f"{q.lengths.token_ratio:.2f}",
        f"{e.stock_seconds:.0f} -> {e.shared_seconds:.0f} s",
        f"{e.stock_seconds / e.shared_seconds:.2f}",
        f"{memory} = {total / GIB:.0f} GiB",
        f"{e.rollout / GIB:.0f} GiB",
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    head = (
        "| recipe | GPUs | rows, tokens | token ratio | log-probs and updates, `fsdp2` -> `zorro` | speed-up of these "
        "| memory of a GPU: state + gathered + micro-batch | while sampling |"
    )
    lines = [head, "|---" * 8 + "|", *(row(recipe) for recipe in recipes.every())]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="don't write; exit code 1 if the table would change")
    options = parser.parse_args(argv)
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
    if not options.check:
        PAGE.write_text(written)
    elif page != written:
        print(f"{PAGE} is not what the recipes say: python scripts/recipes/estimates.py")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
