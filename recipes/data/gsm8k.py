"""GSM8K -> veRL's format: grade school problems whose answers veRL scores itself.

    hf download openai/gsm8k --repo-type dataset --local-dir gsm8k
    python3 recipes/data/gsm8k.py --source gsm8k --out data/gsm8k
    python3 recipes/data/gsm8k.py --source gsm8k --out data/gsm8k_16_shots --shots 16 --tokenizer Qwen/Qwen3-30B-A3B

The data set: openai/gsm8k on the Hugging Face hub, configuration `main`, as parquet: main/train-*.parquet (7,473 rows)
and main/test-*.parquet (1,319 rows) with the columns `question` and `answer` ("... #### 72"). The test rows become
validation.parquet.

With `--shots K` each question comes after K other problems of the training rows and their solutions, as earlier turns
of the chat, without the calculator's annotations (<<48/2=24>>). Every question has its own.
"""

import argparse
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prompt_files import Message, PreparationError, Prompt, Selection, arguments_of, exit_code, read_parquet, write

DOWNLOAD = "hf download openai/gsm8k --repo-type dataset --local-dir {source}"
DATA_SOURCE = "openai/gsm8k"  # by this name veRL finds its reward function
INSTRUCTION = 'Think step by step and end with "#### " and the number.'
FINAL_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
CALCULATION = re.compile(r"<<[^>]*>>")


@dataclass(frozen=True)
class Problem:
    question: str
    solution: str
    number: str  # without thousands separators, as veRL compares it

    def asked(self) -> Message:
        return {"role": "user", "content": f"{self.question}\n{INSTRUCTION}"}

    def answered(self) -> Message:
        return {"role": "assistant", "content": f"{self.solution}\n#### {self.number}"}


def read_problems(source: Path, split: str) -> list[Problem]:
    download = DOWNLOAD.format(source=source)
    rows = read_parquet(source, f"main/{split}-*.parquet", ["question", "answer"], download)
    problems = []
    for index, row in enumerate(rows):
        final = FINAL_NUMBER.search(row["answer"] or "")
        if final is None or not row["question"]:
            raise PreparationError(
                f"{source}/main, {split} row {index}: no question, or no answer that ends in '#### 72'"
            )
        solution = CALCULATION.sub("", row["answer"][: final.start()]).strip()
        problems.append(Problem(row["question"].strip(), solution, final[1].replace(",", "")))
    return problems


def shots_for(problem: Problem, pool: Sequence[Problem], count: int, rng: random.Random) -> list[Problem]:
    """`count` problems of `pool`, whose questions are all different, without this one."""
    drawn = rng.sample(pool, count + 1)
    return [each for each in drawn if each.question != problem.question][:count]


def prompts_of(problems: Sequence[Problem], split: str, pool: Sequence[Problem], shots: int, seed: int) -> list[Prompt]:
    prompts = []
    for index, problem in enumerate(problems):
        drawn = shots_for(problem, pool, shots, random.Random(f"{seed} {split} {index}")) if shots else []
        messages = [message for shot in drawn for message in (shot.asked(), shot.answered())] + [problem.asked()]
        prompts.append(Prompt(index, split, DATA_SOURCE, messages, "math", problem.number))
    return prompts


def prepare(arguments: argparse.Namespace) -> None:
    train = read_problems(arguments.source, "train")
    test = read_problems(arguments.source, "test")
    pool = list({problem.question: problem for problem in train}.values())
    if not 0 <= arguments.shots < len(pool):
        raise PreparationError(
            f"--shots {arguments.shots}: expected 0 to {len(pool) - 1}, as train has {len(pool)} different problems"
        )
    selection = Selection(arguments.tokenizer, arguments.max_prompt_tokens)
    write(
        arguments.out,
        selection.keep(prompts_of(train, "train", pool, arguments.shots, arguments.seed)),
        selection.keep(prompts_of(test, "validation", pool, arguments.shots, arguments.seed)),
        selection,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments_of(__doc__)
    parser.add_argument("--shots", type=int, default=0, metavar="K", help="solved problems before each question (0)")
    return exit_code(prepare, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
