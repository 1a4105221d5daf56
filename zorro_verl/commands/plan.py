"""`zorro-verl plan`: what sharing saves, and what fits, from numbers alone."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from zorro_verl.commands.terminal import Json, errors_in_one_line, make_console, make_table, print_json

if TYPE_CHECKING:  # `zorro-verl --help` does without torch
    from zorro_verl.planning import Plan
    from zorro_verl.prediction import Speed, Way


def plan(
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A name such as Qwen3-32B, a checkpoint folder or a config.json.")
    ],
    prompt: Annotated[int, typer.Option(metavar="TOKENS", help="Length of a prompt.")],
    response: Annotated[int, typer.Option(metavar="TOKENS", help="Length of a response, the mean where they vary.")],
    n: Annotated[int, typer.Option("--n", metavar="N", help="Responses to a prompt, rollout.n.")] = 8,
    prompts: Annotated[int, typer.Option(metavar="PROMPTS", help="Those of a step, data.train_batch_size.")] = 256,
    mini_batch: Annotated[
        int | None,
        typer.Option(
            metavar="PROMPTS",
            help="Those of an optimizer step, ppo_mini_batch_size; by default all of a step.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", help="GPUs that train.")] = 8,
    hbm: Annotated[
        float, typer.Option(metavar="GB", help="Memory of a GPU as its data sheet says, taken as 10^9 bytes each.")
    ] = 80,
    sequence_parallel: Annotated[
        int, typer.Option(metavar="N", help="GPUs that a row is spread over, ulysses_sequence_parallel_size.")
    ] = 1,
    logits_optimization: Annotated[
        str,
        typer.Option(metavar="MODE", help="none keeps all logits of responses, compute and memory work in chunks."),
    ] = "none",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing/--no-checkpointing", help="Recompute layers in the backward.")
    ] = True,
    offload: Annotated[
        bool, typer.Option("--offload", help="Weights and optimizer wait in host memory while the rollout samples.")
    ] = False,
    peak_tflops: Annotated[
        float, typer.Option(metavar="N", help="Of a GPU in bfloat16; 989 is an H100 or H200.")
    ] = 989,
    utilisation: Annotated[float, typer.Option(metavar="SHARE", help="Of that peak which training reaches.")] = 0.4,
    as_json: Json = False,
) -> None:
    """Predict what sharing prompts saves, and settings that fit, from lengths, a model and its GPUs.

    Estimates: nothing is run, and rows are taken to be all of one length. Speed-ups are bounds by floating-point work
    of the passes through the model, over veRL's own engine (fsdp2); sampling takes as long with either.
    """
    with errors_in_one_line("plan"):
        from zorro_verl.known_models import config_of
        from zorro_verl.planning import Plan, Question, bytes_of_gpu
        from zorro_verl.prediction import Speed

        speed = Speed(peak_tflops, utilisation)
        question = Question(
            prompt,
            response,
            n,
            prompts,
            gpus,
            bytes_of_gpu(hbm),
            sequence_parallel,
            logits_optimization,
            checkpointing,
            offload,
            mini_batch,
        )
        answer = Plan(config_of(model), question)
        if as_json:
            print_json(record(model, answer, speed))
        else:
            show(model, answer, speed)


def record(model: str, answer: Plan, speed: Speed) -> dict[str, Any]:
    """What is shown, for a program; memory in bytes of one GPU."""
    from zorro_verl.advice import cautions, misfits, objections, overrides, pays

    prediction, whole = answer.prediction, answer.speedup_of_whole_groups
    ways = {"fsdp2": answer.stock, "zorro": answer.shared}
    return {
        "model": model,
        "question": vars(answer.question),
        "pays": pays(answer),
        "objections": objections(answer),
        "fits": None if answer.no_memory is not None else not misfits(answer),
        "misfits": misfits(answer),
        "cautions": cautions(answer),
        "token_ratio": prediction.token_ratio(answer.shared)._asdict(),
        "token_ratio_best": prediction.rows.token_ratio,
        "speedup": answer.speedup._asdict(),
        "speedup_of_whole_groups": whole._asdict(),
        "group_tokens": answer.question.group_tokens,
        "group_fits": answer.holds_group,
        "prompt_computed": answer.copies,
        "no_memory": answer.no_memory,
        "memory": memory(answer),
        "largest_budgets": answer.largest and answer.largest._asdict(),
        "largest_update_budget_without_logits": answer.largest_without_logits,
        "budgets": answer.budgets and answer.budgets._asdict(),
        "fits_with": None if answer.rescue is None else answer.question.changes(answer.rescue),
        "remedy": None if answer.remedy is None else answer.question.changes(answer.remedy),
        "seconds": {
            name: {call: prediction.seconds(one, speed) for call, one in way._asdict().items()}
            for name, way in ways.items()
        },
        "peak_tflops": speed.peak_tflops,
        "utilisation": speed.utilisation,
        "overrides": overrides(answer),
    }


def memory(answer: Plan) -> dict[str, Any] | None:
    """Bytes of one GPU; None where memory isn't predicted."""
    if answer.no_memory is not None:
        return None
    return {
        **answer.shard._asdict(),
        "margin": answer.margin,
        "micro_batch": micro_batch(answer.shared, answer),
        "micro_batch_fsdp2_at_least": micro_batch(answer.stock, answer),
        "resident_while_sampling": answer.resident,
        "rollout_share": answer.rollout_share,
        "gpus_needed": answer.gpus_needed,
        "gpus_suggested": answer.gpus_suggested,
    }


def micro_batch(way: Way, answer: Plan) -> dict[str, int | None] | None:
    """Bytes of the largest in each pass; None where no budget fits."""
    if answer.budgets is None:
        return None
    return {call: one.memory for call, one in way._asdict().items()}


def show(model: str, answer: Plan, speed: Speed) -> None:
    """The plan for a person, on standard output."""
    from zorro_verl.advice import cautions, counted, gain, misfits, objections, overrides, pays
    from zorro_verl.planning import GB, GIB

    console, question = make_console(), answer.question
    console.print(
        f"[bold]{escape(model)}[/bold] on {counted(question.gpus, 'GPU')} of {question.hbm / GB:g} GB = "
        f"{question.hbm / GIB:.1f} GiB; a step has {counted(question.prompts, 'prompt')} x "
        f"{counted(question.n, 'response')} of {question.prompt} + {question.response} tokens."
    )
    for sentence in misfits(answer) + objections(answer):
        console.print(f"[bold yellow]{escape(sentence)}[/bold yellow]")
    if pays(answer):
        verdict, _, numbers = gain(answer).partition(":")
        console.print(f"[bold green]{verdict}[/bold green]:{numbers}")
    for sentence in cautions(answer):
        console.print(f"[yellow]But:[/yellow] {escape(sentence)}")
    show_speedup(console, answer, speed)
    show_memory(console, answer)
    if answer.no_memory is not None or answer.budgets is not None:
        console.print("Settings for veRL:")
        lines = textwrap.wrap(" ".join(overrides(answer)), 100, break_long_words=False, break_on_hyphens=False)
        console.print(" \\\n".join(f"  {line}" for line in lines), soft_wrap=True)
    console.print(
        f"Estimates, not measured. Seconds are operations at {speed.utilisation:.0%} of {speed.peak_tflops:g} TFLOP/s, "
        "with nothing lost to communication. Rows are taken to be all of one length: of those that vary, a longer "
        "group can be cut."
    )


def show_speedup(console: Console, answer: Plan, speed: Speed) -> None:
    """A line for each pass."""
    prediction = answer.prediction
    table = make_table("fsdp2 -> zorro", ">tokens of a step", ">ratio", ">seconds", ">speed-up")
    for call, speedup in answer.speedup._asdict().items():
        ways = getattr(answer.stock, call), getattr(answer.shared, call)
        seconds = (prediction.seconds(one, speed) for one in ways)
        table.add_row(
            {"log_prob": "compute_log_prob", "update": "update_actor"}[call],
            " -> ".join(f"{one.tokens / 1e6:.2f} M" for one in ways),
            f"{ways[0].tokens / ways[1].tokens:.2f}",
            " -> ".join(f"{each:.0f}" if each >= 100 else f"{each:.3g}" for each in seconds),
            f"{speedup:.2f}",
        )
    console.print(table)


def show_memory(console: Console, answer: Plan) -> None:
    """Where a GPU's memory goes, and the token budgets that it leaves room for."""
    from zorro_verl.advice import larger_budget
    from zorro_verl.planning import GIB, MARGIN

    question, shard = answer.question, answer.shard if answer.no_memory is None else None
    group = f"A group is {question.group_tokens} packed tokens"
    if shard is None:
        console.print(f"M{escape(str(answer.no_memory))[1:]}.\n{group}: ppo_max_token_len_per_gpu should hold one.")
        return
    console.print(
        f"Memory of a GPU, in GiB: weights {shard.weights / GIB:.1f} + gradients {shard.gradients / GIB:.1f} + "
        f"optimizer {shard.optimizer / GIB:.1f} + gathered by FSDP {shard.gathered / GIB:.1f} + left free "
        f"{answer.margin / GIB:.1f} ({MARGIN:.0%}); {max(answer.free, 0) / GIB:.1f} remain for micro-batches."
    )
    if answer.budgets is None or answer.largest is None:
        return
    taken = [f"{(one.memory or 0) / GIB:.1f} GiB" for one in (answer.shared.update, answer.shared.log_prob)]
    console.print(
        f"Largest that fit: ppo_max_token_len_per_gpu={answer.largest.update}, "
        f"log_prob_max_token_len_per_gpu={answer.largest.log_prob}; suggested {answer.budgets.update} "
        f"({taken[0]}) and {answer.budgets.log_prob} ({taken[1]})."
    )
    more = larger_budget(answer)
    if more is not None:
        console.print(more)
    width = question.sequence_parallel
    room = f"{answer.budgets.update * width}" + (f" ({answer.budgets.update} x {width} GPUs)" if width > 1 else "")
    console.print(f"{group}; a micro-batch holds {room}, {'a whole group' if answer.holds_group else 'less'}.")
    console.print(
        f"While sampling, {answer.resident / GIB:.1f} GiB stay for weights and optimizer"
        f"{'' if question.offload else ' (0 with --offload)'}: rollout.gpu_memory_utilization of at most "
        f"{answer.rollout_share:.2f}."
    )
