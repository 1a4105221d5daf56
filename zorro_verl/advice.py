"""What a plan means, in words: why sharing doesn't pay, what the prediction leaves out, and what to set in veRL."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from zorro_verl.planning import GIB, MARGIN, Plan, Question

PAYS = 1.1  # a speed-up below it is lost among other things
HARDLY = 1.2  # and below it, is little
LARGER = 1.1  # a budget by so much is worth a line
FEW_GROUPS = 4  # on a rank
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "gpus": "--gpus {}",
        "sequence_parallel": "--sequence-parallel {}",
        "logits_optimization": "--logits-optimization {}",
        "checkpointing": "--checkpointing",
    }
)


def pays(plan: Plan) -> bool:
    """Whether sharing prompts is worth it, where it fits."""
    return plan.question.n > 1 and max(plan.speedup) >= PAYS


def gain(plan: Plan) -> str:
    """What it gives where it `pays`, in a sentence."""
    verdict = "It hardly pays" if max(plan.speedup) < HARDLY else "It pays"
    if misfits(plan):
        verdict = f"Where it fits, i{verdict[1:]}"
    return (
        f"{verdict}: compute_log_prob up to {plan.speedup.log_prob:.2f} times faster, update_actor "
        f"{plan.speedup.update:.2f} times, than with strategy=fsdp2."
    )


def larger_budget(plan: Plan) -> str | None:
    """What other logits leave room for, where that is clearly more."""
    most = plan.largest_without_logits
    if plan.question.logits_optimization != "none" or plan.largest is None or most is None:
        return None
    if most < LARGER * plan.largest.update:
        return None
    return f"With --logits-optimization memory: ppo_max_token_len_per_gpu up to {most}"


def objections(plan: Plan) -> list[str]:
    """Why sharing prompts doesn't pay here, in a sentence; none where it `pays`."""
    question = plan.question
    if pays(plan):
        return []
    if question.n == 1:
        return ["It doesn't pay: with n = 1 no two rows have a prompt in common."]
    if max(plan.speedup_of_whole_groups) < PAYS:
        return [
            f"It doesn't pay: a prompt of {counted(question.prompt, 'token')} is short beside "
            f"{question.n * question.response} of its responses."
        ]
    return ["It doesn't pay: groups are cut so often that little is shared."]


def misfits(plan: Plan) -> list[str]:
    """Why GPUs can't hold the model and one row, in a sentence; none where they do, or memory isn't predicted."""
    return [_too_large(plan)] if plan.no_memory is None and plan.largest is None else []


def cautions(plan: Plan) -> list[str]:
    """What costs part of the saving, or may, a sentence each."""
    question, found = plan.question, list[str]()
    if question.n == 1:
        return found
    if not plan.holds_group and plan.largest is not None:
        found.append(_cut(plan))
    prompts, ranks = counted(question.step_prompts, "prompt"), counted(question.ranks, "data-parallel rank")
    if question.groups_per_rank < 1:
        found.append(
            f"It pays less than it could: an optimizer step has {prompts} for {ranks}, so that groups are cut. Raise "
            f"{_prompts_option(question)} or --sequence-parallel."
        )
    elif question.groups_per_rank < FEW_GROUPS:
        found.append(
            f"A rank has only {counted(question.groups_per_rank, 'group')} in an optimizer step: where lengths vary, "
            f"all wait for the longest. Raise {_prompts_option(question)}."
        )
    if question.groups_per_rank > 1 and question.step_prompts % question.ranks:
        found.append(f"An optimizer step's {prompts} don't divide over {ranks}: some groups are cut.")
    return found


def counted(number: float, what: str) -> str:
    """``1 group``, ``1.5 groups``."""
    return f"{round(number, 2):.10g} {what}{'' if number == 1 else 's'}"


def overrides(plan: Plan) -> list[str]:
    """Settings for `verl.trainer.main_ppo`; without budgets where memory isn't predicted or nothing fits."""
    question, actor = plan.question, "actor_rollout_ref.actor"
    found = [f"{actor}.strategy=zorro", f"data.train_batch_size={question.prompts}"]
    found += [f"actor_rollout_ref.rollout.n={question.n}", f"{actor}.use_dynamic_bsz=True"]
    found.append(f"{actor}.ppo_mini_batch_size={question.step_prompts}")
    if plan.budgets is not None:
        found += [
            f"{actor}.ppo_max_token_len_per_gpu={plan.budgets.update}",
            f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={plan.budgets.log_prob}",
            f"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu={plan.budgets.log_prob}",
        ]
    if question.sequence_parallel > 1:
        found.append(f"{actor}.ulysses_sequence_parallel_size={question.sequence_parallel}")
    if question.logits_optimization == "memory":
        found.append("actor_rollout_ref.model.use_fused_kernels=True")
    elif question.logits_optimization == "compute":
        found.append(f"{actor}.entropy_from_logits_with_chunking=True")
    found.append(f"actor_rollout_ref.model.enable_gradient_checkpointing={question.checkpointing}")
    if question.offload:
        found += [f"{actor}.fsdp_config.{part}_offload=True" for part in ("param", "optimizer")]
    return found


def flags(question: Question, other: Question) -> str:
    """What to add to the command that asked a question in order to ask another one."""
    changes: dict[str, Any] = question.changes(other)
    return " ".join(_FLAGS[name].format(value) for name, value in changes.items())


def _prompts_option(question: Question) -> str:
    """What says how many prompts an optimizer step has."""
    return "--prompts" if question.mini_batch is None else "--mini-batch"


def _cut(plan: Plan) -> str:
    return (
        f"A group doesn't fit a micro-batch: an update computes its prompt {plan.copies:.3g} times, and is "
        f"{plan.speedup.update:.2f} instead of {plan.speedup_of_whole_groups.update:.2f} times faster. {_way_out(plan)}"
    )


def _too_large(plan: Plan) -> str:
    question = plan.question
    what = (
        f"It doesn't fit: {sum(plan.shard) / GIB:.1f} GiB of state and gathered weights + "
        f"{plan.taken_by_row / GIB:.1f} GiB for a micro-batch of one row of {counted(question.tokens_of(1), 'token')} "
        f"are more than {(question.hbm - plan.margin) / GIB:.1f} GiB, {1 - MARGIN:.0%} of {question.hbm / GIB:.1f} GiB"
    )
    if plan.gpus_needed is None:
        what += "; with these settings no number of GPUs would hold it."
    elif plan.gpus_suggested is None:
        what += (
            f"; {plan.gpus_needed} GPUs or more would hold it, but {question.step_prompts} x {question.n} rows divide "
            f"over none of the next numbers: change {_prompts_option(question)}."
        )
    else:
        what += f"; {plan.gpus_suggested} GPUs would hold it."
    if plan.rescue is None:
        if plan.gpus_needed is None:
            what += " No other settings were found that do: it takes larger GPUs, or shorter prompts and responses."
    elif plan.rescue.gpus != plan.gpus_suggested or list(question.changes(plan.rescue)) != ["gpus"]:
        what += f" It fits with {flags(question, plan.rescue)}."
    if plan.remedy is not None and plan.remedy != plan.rescue:
        what += f" A whole group fits with {flags(question, plan.remedy)}."
    return what


def _way_out(plan: Plan) -> str:
    if plan.remedy is None:
        return "No setting was found that holds a whole group: it takes fewer responses, or shorter ones."
    return f"Whole with {flags(plan.question, plan.remedy)}."
