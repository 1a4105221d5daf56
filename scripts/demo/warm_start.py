"""Builds the demo's checkpoint and parquet files once: a minute of plain supervised steps, always the same ones."""

import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import material
import pandas
import torch
import torch.nn.functional as F
import transformers

PRODUCTS = (
    "model/config.json",
    "model/model.safetensors",
    "model/tokenizer.json",
    "train.parquet",
    "validation.parquet",
)


@dataclass(frozen=True)
class WarmStart:
    steps: int = 800
    learning_rate: float = 2e-3
    train_problems: int = 1024
    validation_problems: int = 64
    seed: int = 0


def ensure(folder: Path, settings: WarmStart, say: Callable[[str], None]) -> None:
    """Leaves `model/`, `train.parquet` and `validation.parquet` in the folder; a finished one is not built again."""
    stamp, wanted = folder / "built.json", recipe(settings)
    complete = all((folder / name).is_file() for name in (stamp.name, *PRODUCTS))
    if complete and json.loads(stamp.read_text()) == wanted:
        say(f"warm start: already there ({folder})")
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build(folder, settings, say)
    stamp.write_text(json.dumps(wanted, indent=2))  # last: an interrupted build has none


def recipe(settings: WarmStart) -> dict:
    """What the result depends on."""
    sources = b"".join(Path(module).read_bytes() for module in (__file__, material.__file__))
    packages = {name: version(name) for name in ("torch", "transformers", "tokenizers", "reasoning-gym")}
    return {**asdict(settings), **packages, "sources": hashlib.sha256(sources).hexdigest()}


def build(folder: Path, settings: WarmStart, say: Callable[[str], None]) -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # two threads on a busy pair of cores are several times slower than one
    rng = random.Random(settings.seed)
    pool = material.make_problems(2000, seed=settings.seed)
    tokenizer = material.build_tokenizer(pool)
    model = material.build_model(tokenizer, settings.seed).train()
    size = sum(p.numel() for p in model.parameters())
    say(f"warm start: {settings.steps} supervised steps on a random Qwen3 of {size:,} parameters")

    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step / settings.steps))
    started = time.monotonic()
    for step in range(1, settings.steps + 1):
        tokens, is_answer = encode(tokenizer, lesson(step / settings.steps, pool, rng))
        hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
        loss = F.cross_entropy(model.lm_head(hidden[is_answer[:, 1:]]), tokens[:, 1:][is_answer[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0 or step == settings.steps:
            say(f"warm start: step {step}/{settings.steps}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s")

    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    for split, count in (("train", settings.train_problems), ("validation", settings.validation_problems)):
        write_rows(folder / f"{split}.parquet", split, count, pool, rng)


def learning_rate_factor(progress: float) -> float:
    """Up over the first 6 %, down over the last 30 %."""
    return min(1.0, progress / 0.06 + 0.03, max(0.1, (1 - progress) / 0.3))


def lesson(progress: float, pool: list[material.Problem], rng: random.Random) -> list[list[dict[str, str]]]:
    """Short chats that are always right first: from those the facts are learned much sooner. Then whole ones."""
    if progress < 0.6:
        return [material.demonstration(pool, rng, shots=2, wrong=0.0) for _ in range(4)]
    return [material.demonstration(pool, rng, material.SHOTS, material.WRONG_ANSWERS)]


def encode(
    tokenizer: transformers.PreTrainedTokenizerBase, chats: list[list[dict[str, str]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens, and which of them are answers: those of the shots teach as well."""
    encoded = tokenizer.apply_chat_template(
        chats,
        tokenize=True,
        padding=True,
        padding_side="right",
        return_dict=True,
        return_assistant_tokens_mask=True,
        return_tensors="pt",
    )
    return encoded["input_ids"], encoded["assistant_masks"].bool()


def write_rows(path: Path, split: str, count: int, pool: list[material.Problem], rng: random.Random) -> None:
    problems = material.make_problems(count, seed={"train": 700_000, "validation": 900_000}[split])
    rows = [
        material.verl_row(problem, material.draw_shots(problem, pool, rng), index, split)
        for index, problem in enumerate(problems)
    ]
    pandas.DataFrame(rows).to_parquet(path)
