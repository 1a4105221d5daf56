"""What the preparation scripts share: prompts, their length in tokens, train.parquet and validation.parquet."""

import argparse
import importlib.util
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypedDict

import pyarrow
import pyarrow.parquet

QUANTILES = (0.05, 0.5, 0.95)


class Message(TypedDict):
    role: str
    content: str


class PreparationError(ValueError):
    """What is missing or wrong, where, and what mends it."""


@dataclass(frozen=True)
class Prompt:
    """A chat to be answered, and what the reward function will be given with the answer."""

    index: int  # of the row in the data set's own split
    split: str
    data_source: str
    messages: list[Message]
    ability: str
    ground_truth: str
    database: str | None = None

    def row(self) -> dict:
        """The columns that veRL reads."""
        extra_info = {"index": self.index, "split": self.split}
        if self.database is not None:
            extra_info["database"] = self.database
        return {
            "data_source": self.data_source,
            "prompt": self.messages,
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": self.ground_truth},
            "extra_info": extra_info,
        }


class Selection:
    """Keeps prompts of at most `longest` tokens and counts what is left out, by reason.

    Tokens are counted as veRL does: the chat template with the generation prompt, its options as they are by default.
    """

    def __init__(self, tokenizer: str | None, longest: int | None):
        if longest is not None and tokenizer is None:
            raise PreparationError(
                "--max-prompt-tokens needs --tokenizer: the name or folder of the model to be trained"
            )
        self.longest = longest
        self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        self.tokens: list[int] = []
        self.left_out: Counter[str] = Counter()

    def keep(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        return [prompt for prompt in prompts if self._fits(prompt)]

    def leave_out(self, count: int, reason: str) -> None:
        self.left_out += Counter({reason: count})  # a count of zero is dropped

    def _fits(self, prompt: Prompt) -> bool:
        if self.tokenizer is None:
            return True
        tokens = count_tokens(self.tokenizer, prompt.messages)
        if self.longest is not None and tokens > self.longest:
            self.leave_out(1, f"longer than {self.longest} tokens")
            return False
        self.tokens.append(tokens)
        return True

    def report(self) -> str:
        reasons = "".join(f" ({count} {reason})" for reason, count in self.left_out.items())
        report = f"{self.left_out.total()} prompts left out{reasons}"
        if not self.tokens:
            return report
        ordered = sorted(self.tokens)
        quantiles = [f"{share:.0%} {ordered[int(share * (len(ordered) - 1))]}" for share in QUANTILES]
        return f"{report}; tokens of a prompt: {', '.join(quantiles)}, longest {ordered[-1]}"


def load_tokenizer(name: str):
    """A tokenizer that has a chat template."""
    from transformers import AutoTokenizer  # takes seconds, and not every call counts tokens

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        count_tokens(tokenizer, [{"role": "user", "content": "?"}])
    except Exception as error:  # transformers raises whatever its many loaders raise
        reason = str(error).strip().partition("\n")[0]
        raise PreparationError(
            f"--tokenizer {name} has no tokenizer with a chat template ({type(error).__name__}: {reason}); "
            f"give a folder that has one, or download one with: hf download {name}"
        ) from error
    return tokenizer


def count_tokens(tokenizer, messages: Sequence[Message]) -> int:
    return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


def load_reward(name: str) -> ModuleType:
    """recipes/rewards/`name`.py: what it can't score is not to be trained on."""
    path = Path(__file__).parents[1] / "rewards" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_reward", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def need_folder(folder: Path, download: str) -> None:
    if not folder.is_dir():
        raise PreparationError(f"{folder} is no folder; the command that brings it: {download}")


def read_parquet(source: Path, pattern: str, columns: Sequence[str], download: str) -> list[dict]:
    """The rows of all files of `pattern` in `source`; the error names what is missing and the command `download`."""
    need_folder(source, download)
    paths = sorted(source.glob(pattern))
    if not paths:
        raise PreparationError(f"{source} has no {pattern}; the command that brings it: {download}")
    rows = []
    for path in paths:
        try:
            table = pyarrow.parquet.read_table(path, partitioning=None)
        except (OSError, pyarrow.ArrowException) as error:
            raise PreparationError(f"{path} can't be read ({error}); the command that brings it: {download}") from error
        missing = [name for name in columns if name not in table.column_names]
        if missing:
            raise PreparationError(
                f"{path} has no column {', '.join(missing)}, it has {', '.join(table.column_names)}; "
                f"the command that brings the format that is expected: {download}"
            )
        rows += table.select(columns).to_pylist()
    return rows


def write(out: Path, train: Sequence[Prompt], validation: Sequence[Prompt], selection: Selection) -> None:
    """Writes both files, each of which is whole before any takes its place, and prints what was written."""
    files = {"train.parquet": train, "validation.parquet": validation}
    for name, prompts in files.items():
        if not prompts:
            raise PreparationError(f"{out / name} would have no prompt: {selection.report()}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".unfinished-") as unfinished:
            for name, prompts in files.items():
                table = pyarrow.Table.from_pylist([prompt.row() for prompt in prompts])
                pyarrow.parquet.write_table(table, Path(unfinished, name))
            for name in files:
                os.replace(Path(unfinished, name), out / name)
    except OSError as error:
        raise PreparationError(f"--out {out} can't be written: {error}") from error
    rows = ", ".join(f"{name} {len(prompts)} rows" for name, prompts in files.items())
    print(f"{out}: {rows}; {selection.report()}")


def arguments_of(docstring: str) -> argparse.ArgumentParser:
    """The arguments that every preparation script has; its docstring is its help."""
    parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, metavar="FOLDER", help="the data set as downloaded")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the two files")
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="name or folder; with it, the tokens of prompts are counted"
    )
    parser.add_argument("--max-prompt-tokens", type=int, metavar="N", help="longer prompts are left out")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn at random (default: 0)")
    return parser


def exit_code(prepare: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> int:
    """0, or 1 after one line on stderr."""
    try:
        if arguments.out.resolve().is_relative_to(arguments.source.resolve()):
            raise PreparationError(f"--out {arguments.out} is in --source {arguments.source}: give another folder")
        prepare(arguments)
    except PreparationError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0
