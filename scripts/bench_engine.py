"""Through veRL's engine on a CPU: how the cost of log-probs and of an update grows, stock `fsdp2` against `zorro`.

    python scripts/bench_engine.py                  # both sweeps, then JSON
    python scripts/bench_engine.py --quick          # fewer points; what is left out is listed
    python scripts/bench_engine.py --json docs/results/engine.json --plot docs/images/engine.png

Both are veRL's own `TrainingWorker`s in one process, with the same weights, batch and settings; `compute_log_prob` is
its `infer_batch` with entropy, `update_actor` its `train_mini_batch`. The learning rate is 0: the optimizer does its
work and every point starts from the same weights. A point has figures only when log-probs, entropy, gradients and the
update's metrics agree. The stock side is given the faster of its two layouts on a CPU, which is measured first.

The bound is the quotient of the multiplications that the two need: the stock engine's head runs on every token of its
rows, the other's on response tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing as mp
from measuring import (
    P_R_N,
    Disagreement,
    agree,
    as_argument,
    command_line,
    count,
    largest,
    markdown_header,
    markdown_row,
    write_json,
)
from tensordict import TensorDict
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from zorro_verl.flops import ModelWork
from zorro_verl.measuring import Effort, Shape, Timing, clock_for, environment, time_interleaved

CONFIG = Qwen3Config(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=1024,
    max_position_embeddings=16384,
    tie_word_embeddings=False,
)
TOLERANCE = 2e-5  # float32: log-probs, entropy and metrics absolutely, gradients as a share of the largest
TOKEN_BUDGET = 16384  # of a micro-batch: veRL's default
STRATEGIES = ("fsdp2", "zorro")
PHASES = ("compute_log_prob", "update_actor")
# veRL averages these over micro-batches of whatever sizes, so they say how rows were cut, too.
MEANS_OF_MICRO_BATCHES = ("actor/ppo_kl", "actor/pg_clipfrac")
LAYOUTS = ("padded", "remove-padding")  # of the stock engine's rows
LAYOUT_SHAPE = Shape(256, 64, 8)


@dataclass(frozen=True)
class Sweep:
    """Shapes in which one number grows."""

    name: str
    shapes: tuple[Shape, ...]


SWEEPS = (
    Sweep("n", tuple(Shape(1024, 64, n) for n in (1, 2, 4, 8, 16, 32))),
    Sweep("P", tuple(Shape(P, 64, 8) for P in (256, 512, 1024, 2048, 4096, 8192))),
)
QUICK = {"n": (1, 4, 8), "P": (256, 1024)}


def effort_for(shape: Shape, rounds: int) -> Effort:
    """Short points vary most and get up to five times the rounds; by tokens, so that all ranks run the same number."""
    return Effort(rounds * min(5, max(1, 2 * TOKEN_BUDGET // shape.tokens_padded)))


def bound(shape: Shape) -> float:
    """Multiplications of the stock engine over the other's; its backward is the same multiple of both."""
    work = ModelWork.of(CONFIG).of_groups([shape.group])
    return (work.counted + work.prompt_head) / work.executed


def jagged(rows: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def draw_batch(shape: Shape, rank: int) -> TensorDict:
    """The rows of one group in the layout that veRL's trainer hands its workers; one advantage for each row."""
    generator = torch.Generator().manual_seed(1000 * shape.P + 10 * shape.n + rank)
    prompt = torch.randint(1, CONFIG.vocab_size, (shape.P,), generator=generator)
    responses = torch.randint(1, CONFIG.vocab_size, (shape.n, shape.R), generator=generator)
    advantages = torch.randn(shape.n, 1, generator=generator).expand(-1, shape.R)
    mask = jagged(torch.ones_like(responses))
    fields = {
        "input_ids": jagged([torch.cat([prompt, response]) for response in responses]),
        "position_ids": jagged([torch.arange(shape.P + shape.R)] * shape.n),
        "prompts": jagged([prompt] * shape.n),
        "responses": jagged(responses),
        "response_mask": mask,
        "loss_mask": mask,
        "advantages": jagged(advantages),
    }
    return TensorDict(fields, batch_size=shape.n)


class Worker:
    """One of veRL's training workers, called as its trainer calls it.

    Args:
        strategy: "fsdp2" or "zorro".
        model: the checkpoint's folder.
        layout: of the stock side's rows, "padded" or "remove-padding".
        attention: what its model asks for.
        precision: "fp32", or "bf16" on float32 weights.
        token_budget: of a micro-batch; `TOKEN_BUDGET` when None.
    """

    def __init__(
        self,
        strategy: str,
        model: str,
        layout: str,
        attention: str = "sdpa",
        precision: str = "fp32",
        token_budget: int | None = None,
    ):
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import (
            FSDPActorConfig,
            FSDPEngineConfig,
            FSDPOptimizerConfig,
            HFModelConfig,
            TrainingWorkerConfig,
        )
        from verl.workers.engine_workers import TrainingWorker
        from verl.workers.utils.losses import ppo_loss

        remove_padding = layout == "remove-padding"
        precisions = {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        engine = FSDPEngineConfig(strategy="fsdp2", mixed_precision=precisions, use_torch_compile=False)
        object.__setattr__(engine, "strategy", strategy)  # the dataclass knows veRL's own alone
        self._settings = {
            "temperature": 1.0,
            "use_remove_padding": remove_padding,
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": token_budget or TOKEN_BUDGET,
            "use_fused_kernels": False,
        }
        config = TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=model,
                load_tokenizer=False,
                use_remove_padding=remove_padding,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": attention},
            ),
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=10**6),
            checkpoint_config=CheckpointConfig(),
        )
        with contextlib.redirect_stdout(sys.stderr):  # veRL says a good deal there; the table stands alone
            self._worker = TrainingWorker(config)
            self._worker.reset()
        loss = FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True)
        self._loss = partial(ppo_loss, config=loss)
        self._worker.set_loss_fn(self._loss)

    def compute_log_prob(self, batch: TensorDict) -> dict[str, list[Tensor]]:
        """Log-probs and entropy of each row's response tokens."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.utils.padding import response_from_nested

        data = self._settled(batch, calculate_entropy=True, compute_loss=False)
        output = self._worker.infer_batch(data)
        values = {name: tu.get(output, name) for name in ("log_probs", "entropy")}
        return {name: list(response_from_nested(x, batch["response_mask"]).unbind()) for name, x in values.items()}

    def update_actor(self, batch: TensorDict) -> dict[str, float]:
        """One mini-batch over all rows of all ranks; the metrics that veRL reports of it."""
        from verl.utils import tensordict_utils as tu
        from verl.utils.metric import reduce_metrics

        output = self._worker.train_mini_batch(self._for_update(batch, epochs=1, seed=0, compute_loss=True))
        return reduce_metrics(tu.get(output, "metrics"))

    def gradients(self, batch: TensorDict) -> dict[str, Tensor]:
        """Of the update's loss, from all ranks."""
        engine = self._worker.engine
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(self._for_update(batch), self._loss)
            return {name: p.grad.full_tensor().clone() for name, p in engine.module.named_parameters()}

    def _for_update(self, batch: TensorDict, **settings) -> TensorDict:
        rows = len(batch) * torch.distributed.get_world_size()
        return self._settled(batch, calculate_entropy=False, global_batch_size=rows, mini_batch_size=rows, **settings)

    def _settled(self, batch: TensorDict, **settings) -> TensorDict:
        """A shallow copy with settings: veRL takes some of them out on the way."""
        from verl.utils import tensordict_utils as tu

        data = batch.copy()
        tu.assign_non_tensor(data, **self._settings, **settings)
        return data


def with_old_log_probs(batch: TensorDict, log_probs: Sequence[Tensor]) -> TensorDict:
    """The rows as after a few updates: the policy that sampled them is near this one, not the same."""
    generator = torch.Generator().manual_seed(0)
    noise = (0.1 * torch.randn(row.shape, generator=generator) for row in log_probs)
    batch["old_log_probs"] = jagged([row + change for row, change in zip(log_probs, noise, strict=True)])
    return batch


def differences(stock: Worker, zorro: Worker, batch: TensorDict, cut: bool) -> dict[str, float]:
    """Of everything that the two give for one batch; the warm-up, too.

    Args:
        cut: whether the stock engine needs several micro-batches.
    """
    found = {}
    expected, got = stock.compute_log_prob(batch), zorro.compute_log_prob(batch)
    for name, rows in expected.items():
        found[name] = max(largest(a - b) for a, b in zip(rows, got[name], strict=True))
    batch = with_old_log_probs(batch, expected["log_probs"])
    expected, got = stock.gradients(batch), zorro.gradients(batch)
    scale = max(map(largest, expected.values()))
    found["gradients"] = max(largest(expected[name] - got[name]) for name in expected) / scale
    expected, got = stock.update_actor(batch), zorro.update_actor(batch)
    left_out = ("perf/", "mfu", *(MEANS_OF_MICRO_BATCHES if cut else ()))
    compared = [name for name in expected if not name.startswith(left_out)]
    found["metrics"] = max(abs(expected[name] - got[name]) for name in compared)
    return found


@dataclass(frozen=True)
class Phase:
    """What one of the two calls took."""

    stock: Timing
    zorro: Timing
    bound: float

    def as_dict(self) -> dict:
        clock = clock_for((self.stock, self.zorro))
        speed_up = self.stock.by(clock) / self.zorro.by(clock)
        return {
            "stock_s": asdict(self.stock),
            "zorro_s": asdict(self.zorro),
            "clock": clock,
            "speed_up": speed_up,
            "share_of_bound": speed_up / self.bound,
        }


def measure(stock: Worker, zorro: Worker, shape: Shape, rank: int, rounds: int) -> dict:
    batch = draw_batch(shape, rank)
    found = differences(stock, zorro, batch, cut=shape.tokens_padded > TOKEN_BUDGET)
    # Ranks agree on the worst of them: one that stopped alone would leave the others waiting.
    values = torch.tensor(list(found.values()))
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    found = dict(zip(found, values.tolist(), strict=True))
    agree(found, TOLERANCE)
    phases, effort = {}, effort_for(shape, rounds)
    for name in PHASES:
        timings = time_interleaved([partial(getattr(worker, name), batch) for worker in (stock, zorro)], effort)
        phases[name] = Phase(*timings, bound(shape)).as_dict()
    sizes = {"tokens_rows": shape.tokens_padded, "tokens_packed": shape.tokens_packed, "flop_bound": bound(shape)}
    return {**asdict(shape), **sizes, **phases, "difference": found}


COLUMNS = (
    "P, R, n",
    "tokens, rows -> packed",
    "bound",
    "log-prob s, stock -> zorro",
    "speed-up",
    "of bound",
    "update s, stock -> zorro",
    "speed-up",
    "of bound",
    "max diff log-prob, entropy, gradient, metric",
    "clock",
)


def table_row(point: dict) -> str:
    cells = [f"{point['P']}, {point['R']}, {point['n']}", f"{point['tokens_rows']} -> {point['tokens_packed']}"]
    cells.append(f"{point['flop_bound']:.2f}")
    for phase in (point[name] for name in PHASES):
        cells.append(" -> ".join(f"{phase[side][phase['clock']]:.3f}" for side in ("stock_s", "zorro_s")))
        cells += [f"{phase['speed_up']:.2f}", f"{phase['share_of_bound']:.0%}"]
    cells.append(", ".join(f"{difference:.0e}" for difference in point["difference"].values()))
    cells.append(" ".join(dict.fromkeys(point[name]["clock"] for name in PHASES)))
    return markdown_row(cells)


def measure_layouts(rank: int, model: str) -> dict[str, float]:
    """CPU seconds of log-probs and update of the stock engine, for each layout of its rows."""
    seconds = {}
    for layout in LAYOUTS:
        worker, batch = Worker("fsdp2", model, layout), draw_batch(LAYOUT_SHAPE, rank)
        batch = with_old_log_probs(batch, worker.compute_log_prob(batch)["log_probs"])
        calls = [partial(getattr(worker, phase), batch) for phase in PHASES]
        seconds[layout] = sum(timing.cpu for timing in time_interleaved(calls, Effort(3)))
    return seconds


def measure_sweeps(rank: int, model: str, layout: str, sweeps: Sequence[Sweep], rounds: int) -> dict:
    """The points of each sweep, printed by rank 0 as they come; a point that is in two is measured once."""
    say = print if rank == 0 else (lambda *_, **__: None)
    stock, zorro = (Worker(strategy, model, layout) for strategy in STRATEGIES)
    say(f"\n{markdown_header(COLUMNS)}", flush=True)
    measured: dict[Shape, dict] = {}
    for shape in (shape for sweep in sweeps for shape in sweep.shapes):
        if shape in measured:
            continue
        try:
            measured[shape] = measure(stock, zorro, shape, rank, rounds)
        except Disagreement as error:
            return {"failure": f"P, R, n = {shape}: {error}"}
        say(table_row(measured[shape]), flush=True)
    return {sweep.name: [measured[shape] for shape in sweep.shapes] for sweep in sweeps}


def in_ranks(count: int, function: Callable[..., dict], *arguments: object) -> dict:
    """What ``function(rank, *arguments)`` returns on rank 0 of a gloo group of fresh processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        mp.spawn(_rank, (count, port, result, function, arguments), nprocs=count)
        return json.loads(result.read_text())


def _rank(rank: int, count: int, port: int, result: Path, function: Callable[..., dict], arguments: tuple) -> None:
    ranks = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(ranks, VERL_PLATFORM="cpu")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("cpu:gloo", rank=rank, world_size=count)
    found = function(rank, *arguments)
    if rank == 0:
        result.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def left_out(sweeps: Sequence[Sweep]) -> list[str]:
    """Points of the whole sweeps that were not asked for."""
    asked = {shape for sweep in sweeps for shape in sweep.shapes}
    return [str(shape) for sweep in SWEEPS for shape in sweep.shapes if shape not in asked]


def draw(record: dict):
    """Seconds against n and against P, a row for each call; the bound is the stock engine's time divided by it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sweeps = record["sweeps"]
    figure, panels = plt.subplots(
        len(PHASES), len(sweeps), figsize=(9, 6.2), sharey="row", squeeze=False, layout="constrained"
    )
    for row, phase in zip(panels, PHASES, strict=True):
        for panel, (name, points) in zip(row, sweeps.items(), strict=True):
            at = [point[name] for point in points]
            times = {
                side: [point[phase][f"{side}_s"][point[phase]["clock"]] for point in points]
                for side in ("stock", "zorro")
            }
            least = [t / point["flop_bound"] for t, point in zip(times["stock"], points, strict=True)]
            panel.plot(at, least, label="stock / FLOP bound", color="0.6", linewidth=5, alpha=0.6)
            panel.plot(at, times["stock"], label="fsdp2 (stock)", color="tab:orange", marker="s")
            panel.plot(at, times["zorro"], label="zorro", color="tab:blue", marker="o")
            fixed = ", ".join(f"{key} = {points[0][key]}" for key in "PRn" if key != name)
            panel.set(title=f"{phase}, {fixed}", xlabel=name, xscale="log", yscale="log")
            panel.set_xticks(at, map(str, at))
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        row[0].set_ylabel("seconds")
    panels[0][0].legend(loc="upper left")
    return figure


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=count, help="least interleaved runs of each side (default: 3, --quick: 2)")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks, a group on each (default: 1)")
    parser.add_argument(
        "--shapes",
        type=as_argument(Shape.parse),
        nargs="+",
        metavar="P,R,n",
        help=f"these points in place of sweeps: {P_R_N}",
    )
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON here instead of to the terminal")
    parser.add_argument("--plot", type=Path, metavar="PATH", help="draw the sweeps (needs matplotlib)")
    options = parser.parse_args(argv)
    if options.shapes and (options.quick or options.plot):
        parser.error("--shapes: expected neither --quick nor --plot beside it")
    options.rounds = options.rounds or (2 if options.quick else 3)
    options.sweeps = sweeps_of(options)
    return options


def sweeps_of(options: argparse.Namespace) -> tuple[Sweep, ...]:
    if options.shapes:
        return (Sweep("chosen", tuple(options.shapes)),)
    if not options.quick:
        return SWEEPS
    chosen: Callable[[Sweep], tuple[Shape, ...]] = lambda sweep: tuple(  # noqa: E731
        shape for shape in sweep.shapes if getattr(shape, sweep.name) in QUICK[sweep.name]
    )
    return tuple(Sweep(sweep.name, chosen(sweep)) for sweep in SWEEPS)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    torch.set_num_threads(1)
    start = environment(
        command_line(),
        "verl",
        "transformers",
        model=f"Qwen3, {CONFIG.num_hidden_layers} layers, hidden {CONFIG.hidden_size}, vocabulary {CONFIG.vocab_size}, "
        "float32, random weights",
        method=f"veRL's TrainingWorker, {options.ranks} gloo rank(s) with one group each, micro-batches of at most "
        f"{TOKEN_BUDGET} tokens, medians over {options.rounds} to {5 * options.rounds} "
        f"interleaved rounds, more for short rows; the stock layout chosen at P, R, n = {LAYOUT_SHAPE}",
    )
    print("\n".join(f"{key}: {value}" for key, value in start.items()), flush=True)
    with tempfile.TemporaryDirectory() as model:
        torch.manual_seed(0)
        Qwen3ForCausalLM(CONFIG).save_pretrained(model)
        layouts = in_ranks(options.ranks, measure_layouts, model)
        layout = min(layouts, key=layouts.get)
        print(f"stock layout: {layout} ({', '.join(f'{name} {s:.3f} s' for name, s in layouts.items())})", flush=True)
        sweeps = in_ranks(options.ranks, measure_sweeps, model, layout, options.sweeps, options.rounds)
    if "failure" in sweeps:
        print(sweeps["failure"], file=sys.stderr)
        return 1
    choice = {"stock_layout": layout, "seconds_of_layouts": layouts}
    record = {**start, **choice, "left_out": left_out(options.sweeps), "sweeps": sweeps}
    if options.json:
        write_json(options.json, record)
    else:
        print(f"\n{json.dumps(record, indent=1)}")
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(record).savefig(options.plot, dpi=110, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
