"""DocQA-RL-1.6K -> veRL's format: questions on long documents, of at most 16,384 tokens.

    hf download Tongyi-Zhiwen/DocQA-RL-1.6K --repo-type dataset --local-dir docqa
    python3 recipes/data/long_context_qa.py --source docqa --out data/docqa --tokenizer Qwen/Qwen3-32B

The data set: Tongyi-Zhiwen/DocQA-RL-1.6K on the Hugging Face hub (May 2025), train*.parquet (1,591 rows) with veRL's
columns `data_source`, `prompt` (one message of the user: document, question and the form of the answer), `ability`,
`reward_model` (`ground_truth`: "Therefore, the answer is 42." or "The correct answer is (B).") and `extra_info`. A part
of the rows that fit becomes validation.parquet; the data set's own test rows are not read. The answers are scored by
recipes/rewards/long_context_qa.py, and rows that it can't score are left out.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prompt_files import PreparationError, Prompt, Selection, arguments_of, exit_code, load_reward, read_parquet, write

DOWNLOAD = "hf download Tongyi-Zhiwen/DocQA-RL-1.6K --repo-type dataset --local-dir {source}"
COLUMNS = ("data_source", "prompt", "ability", "reward_model")


def read_prompts(source: Path) -> list[Prompt]:
    rows = read_parquet(source, "**/train*.parquet", COLUMNS, DOWNLOAD.format(source=source))
    prompts = []
    for index, row in enumerate(rows):
        place = f"{source}, row {index} of train"
        truth = isinstance(row["reward_model"], dict) and row["reward_model"].get("ground_truth")
        if not isinstance(truth, str) or not truth.strip():
            raise PreparationError(
                f"{place}: expected text in reward_model.ground_truth, got {row['reward_model']!r:.80}"
            )
        if not is_chat(row["prompt"]):
            raise PreparationError(
                f"{place}: expected messages with role and content in prompt, got {row['prompt']!r:.80}"
            )
        prompts.append(Prompt(index, "train", row["data_source"], row["prompt"], row["ability"], truth))
    return prompts


def is_chat(messages) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(each, dict) and each.get("role") and each.get("content") for each in messages)
    )


def scored(prompts: Sequence[Prompt], selection: Selection) -> list[Prompt]:
    """Those whose ground truth would be right as an answer: for the others no answer is."""
    compute_score = load_reward("long_context_qa").compute_score
    right = [
        compute_score(each.data_source, f"The answer is {each.ground_truth}", each.ground_truth) for each in prompts
    ]
    selection.leave_out(right.count(0.0), "whose ground truth has no answer")
    return [prompt for prompt, score in zip(prompts, right, strict=True) if score]


def prepare(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.validation_share < 1:
        raise PreparationError(f"--validation-share {arguments.validation_share}: expected a number between 0 and 1")
    prompts = read_prompts(arguments.source)
    selection = Selection(arguments.tokenizer, arguments.max_prompt_tokens)
    kept = selection.keep(scored(prompts, selection))
    share = max(1, round(arguments.validation_share * len(kept)))
    drawn = set(random.Random(arguments.seed).sample(range(len(kept)), min(share, len(kept))))
    train = [prompt for place, prompt in enumerate(kept) if place not in drawn]
    validation = [replace(kept[place], split="validation") for place in sorted(drawn)]
    write(arguments.out, train, validation, selection)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments_of(__doc__)
    parser.set_defaults(max_prompt_tokens=16384)
    parser.add_argument(
        "--validation-share", type=float, default=0.05, metavar="X", help="of the rows that fit (default: 0.05)"
    )
    return exit_code(prepare, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
