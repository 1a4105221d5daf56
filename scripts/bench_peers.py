"""Forward + backward on a CPU beside other implementations of shared prompts, each in an environment of its own.

    python scripts/bench_peers.py --setup           # once: makes .versions/peers-*
    python scripts/bench_peers.py --json out.json   # the table, and the same as JSON

All get the same weights, the same batch and one thread, and run a step by turns, each in a process that is alive
meanwhile. A step starts from token ids and ends with gradients. Each is first held against the plain Hugging Face model
of its own environment and against the one of this environment: log-probs of all response tokens, gradients of all
parameters. What computes something else gets no speed-up, and what does not run is listed with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from bench_cpu import CONFIG
from measuring import P_R_N, as_argument, command_line, count, duration, write_json
from peers.batch import Batch, save_model
from peers.cases import CASES, Case
from peers.environments import ARCTIC, OWN, PREFIX_GROUPER
from peers.race import PLAIN, Contestant, Race
from peers.standings import Standings, table
from transformers import Qwen3ForCausalLM

from zorro_verl.measuring import Effort, environment

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
CONTESTANTS = (
    Contestant(PLAIN, OWN, PLAIN, "the Hugging Face model on padded rows, sdpa, head on response tokens"),
    Contestant("zorro", OWN, PLAIN, "this project, sdpa"),
    Contestant(
        "prefix-grouper",
        PREFIX_GROUPER,
        PLAIN,
        "PrefixGrouper as documented, with sdpa; head on all tokens; "
        "on a CPU its response call needs a dense mask, flash-attention, for which it was written, needs none",
    ),
    Contestant("prefix-grouper-response-head", PREFIX_GROUPER, PLAIN, "the same with the head on response tokens"),
    Contestant("arctic-plain", ARCTIC, "arctic-plain", "the Hugging Face model in arctic-platform's environment"),
    Contestant("arctic-sdpa", ARCTIC, "arctic-plain", "arctic-platform, sdpa, its masks kept from the first step"),
    Contestant(
        "arctic-flash-emulated",
        ARCTIC,
        "arctic-plain",
        "arctic-platform's flash path, its kernel emulated by one sdpa call for each sequence",
    ),
)


def measure(case: Case, contestants: Sequence[Contestant], folder: Path, effort: Effort, limit: float) -> Standings:
    """The folder holds the model, and takes the batch and all results."""
    Batch.random(case.groups, CONFIG.vocab_size).save(folder / "batch.safetensors")
    with contextlib.ExitStack() as stack:
        race = Race(contestants, folder, limit, stack)
        race.compare()
        race.run(effort)
    return Standings(case, tuple(race.results.values()))


def save_random_model(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {name: getattr(CONFIG, name) for name in SIZES}
    save_model(folder, sizes, Qwen3ForCausalLM(CONFIG).state_dict())


def set_up(contestants: Sequence[Contestant]) -> int:
    """Each environment in turn; one that fails does not keep the next one from being made."""
    failed = False
    for surroundings in dict.fromkeys(contestant.environment for contestant in contestants):
        try:
            surroundings.set_up()
        except SystemExit as error:
            failed = True
            print(error, file=sys.stderr)
    return int(failed)


def arguments(argv: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setup", action="store_true", help="make or mend the environments, and stop")
    parser.add_argument(
        "--shapes",
        type=as_argument(Case.parse),
        nargs="+",
        default=CASES,
        metavar="P,R,n",
        help=f'{P_R_N}; or "ragged", four uneven groups (default: {" ".join(case.name for case in CASES)})',
    )
    parser.add_argument(
        "--contestants", nargs="+", choices=names, default=names, help="the plain models that they need run with them"
    )
    parser.add_argument("--rounds", type=count, default=5, help="least interleaved steps of each (default: 5)")
    parser.add_argument("--seconds", type=duration, default=30, help="least time for each shape (default: 30)")
    parser.add_argument("--limit", type=float, default=300, help="longest wait for one step, in seconds (default: 300)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here, too")
    return parser.parse_args(argv)


def chosen(names: Sequence[str], contestants: Sequence[Contestant]) -> list[Contestant]:
    """Those of these names, and the plain models that they are held against."""
    needed = {PLAIN, *names, *(contestant.baseline for contestant in contestants if contestant.name in names)}
    return [contestant for contestant in contestants if contestant.name in needed]


def described_as(contestant: Contestant, standings: Sequence[Standings]) -> dict[str, str | None]:
    """With the versions that its process named, once it ran."""
    results = (result for of_case in standings for result in of_case.results if result.contestant is contestant)
    versions = next((result.versions for result in results if result.versions), None)
    names = {"name": contestant.name, "what": contestant.what, "baseline": contestant.baseline}
    return {**names, "versions": versions or "did not run"}


def main(argv: Sequence[str] | None = None, contestants: Sequence[Contestant] = CONTESTANTS) -> int:
    options = arguments(argv, [contestant.name for contestant in contestants])
    torch.set_num_threads(1)
    entered = chosen(options.contestants, contestants)
    if options.setup:
        return set_up(entered)
    effort = Effort(options.rounds, options.seconds)
    record = environment(
        command_line(),
        "transformers",
        model=f"Qwen3, {CONFIG.num_hidden_layers} layers, hidden {CONFIG.hidden_size}, float32, random weights",
        method=f"forward + backward, a process for each contestant, {effort}",
    )
    print("\n".join(f"{key}: {value}" for key, value in record.items()), flush=True)
    standings = []
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(Path(folder))
        for case in options.shapes:
            standings.append(measure(case, entered, Path(folder), effort, options.limit))
            print(f"\n{table(standings[-1])}", flush=True)
    described = [described_as(contestant, standings) for contestant in entered]
    print("\n" + "\n".join(f"{of['name']}: {of['what']} ({of['versions']})" for of in described))
    if options.json:
        write_json(options.json, {**record, "contestants": described, "results": [s.as_dict() for s in standings]})
    own = [result for of_case in standings for result in of_case.results if result.contestant.environment is OWN]
    return int(any(result.status != "ok" for result in own))


if __name__ == "__main__":
    raise SystemExit(main())
