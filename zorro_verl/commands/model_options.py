"""Options of the commands that run a model: where, and in what it computes."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class Dtype(str, Enum):
    """What a model computes in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"
    float16 = "float16"


DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        metavar="DTYPE",
        help="float32 (default on a CPU), bfloat16 (default on CUDA), float64 or float16.",
        show_default=False,
    ),
]
DeviceOption = Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:N.")]
