"""What `zorro-verl verify` is asked for, checked before torch and transformers, which take seconds, are loaded."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

FEWEST_ROWS = 7


@dataclass(frozen=True)
class Sizes:
    """Rows of the batch, tokens of its longest prompt and of its longest response."""

    rows: int = 10
    prompt: int = 70
    response: int = 12

    def __post_init__(self):
        if self.rows < FEWEST_ROWS:
            raise ValueError(f"rows: expected at least {FEWEST_ROWS} (groups of three, three and one), got {self.rows}")
        if self.prompt < 2 or self.response < 1:
            raise ValueError(
                f"prompt, response: expected at least 2 and 1 tokens, got {self.prompt} and {self.response}"
            )


def local_folder(name: str) -> Path | None:
    """The checkpoint folder that is meant; None for a name on the hub.

    Raises:
        ValueError: a folder that isn't there, or without a config.json that names a model type.
    """
    folder = Path(name).expanduser()
    if not (folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1):
        return None
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"model: expected a checkpoint folder with a config.json, got {name!r}")
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model: expected JSON in {file}, got what can't be read ({error})") from error
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ValueError(f"model: expected a model_type in {file}, got none")
    return folder


def check_device_name(device: str) -> None:
    """Raise a ValueError for what names no device; whether there is one, torch knows."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {device!r}")
