"""What a recipe says without being run: the command line that it hands to veRL, and the preparation that it names."""

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
VARIABLES = ("STRATEGY", "MODEL", "CRITIC_MODEL", "DATA", "OUT", "NNODES", "GPUS_PER_NODE", "PYTHON")
# Takes the place of Python in a recipe and writes down what it is called with.
_STUB = '#!/bin/sh\nfor argument; do printf "%s\\0" "$argument"; done\n'
_PREPARATION = re.compile(r"^#\s+(python3 recipes/data/\S+\.py .*)$", re.MULTILINE)


def every() -> list[Path]:
    """All recipes, by name."""
    return sorted(RECIPES.glob("*.sh"))


def command_line(recipe: Path, variables: Mapping[str, str], *arguments: str) -> list[str]:
    """What a recipe calls Python with, ``-m verl.trainer.main_ppo`` first.

    Args:
        recipe: its file.
        variables: of `VARIABLES`; those that aren't here are as if nobody had set them.
        arguments: of the recipe.

    Raises:
        ValueError: the recipe ended with an error, whose words are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder) / "python"
        stub.write_text(_STUB)
        stub.chmod(0o755)
        inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        environment = inherited | variables | {"PYTHON": str(stub)}
        command = ["bash", str(recipe), *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if result.returncode:
        raise ValueError(f"{recipe}: expected a recipe that calls Python, got {result.stderr.strip()}")
    return result.stdout.split("\0")[:-1]


def settings(arguments: list[str]) -> dict[str, str]:
    """The value of each key of a command line; the last one counts, as for Hydra."""
    pairs = (argument.split("=", 1) for argument in arguments if "=" in argument)
    return {key.lstrip("+"): value for key, value in pairs}


def preparation(recipe: Path) -> list[str]:
    """The words of the command in a recipe's head that prepares its data.

    Raises:
        ValueError: there is none, or more than one.
    """
    lines = _PREPARATION.findall(recipe.read_text())
    if len(lines) != 1:
        raise ValueError(f"{recipe}: expected one line '# python3 recipes/data/<name>.py ...', got {len(lines)}")
    return shlex.split(lines[0], comments=True)
