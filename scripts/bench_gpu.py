"""Sharing prompts on one GPU, beside stock kernels: op, layer, model, head and engine level. No network, no files.

    python scripts/bench_gpu.py --json docs/results/gpu.json    # an H200: within six minutes
    python scripts/bench_gpu.py --quick                         # within two
    python scripts/bench_gpu.py --dry-run                       # what would run, and about how long
    python scripts/bench_gpu.py --device cpu --tiny             # does the script work? on any machine

Needs torch, transformers and this checkout, nothing installed; what else is there (flash-attn, Liger, veRL) is measured
too, and what is not is listed with its reason. Weights are random, of the shapes of Qwen3 models. The baseline is
torch's variable-length flash attention on every row with its own copy of the prompt, its head on response rows only.
Results are compared before anything is timed, with float32 and with each other: exit code 1 and no figure when ours
differ. A contestant that runs out of memory is a result, and the others go on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> int:
    """In this order: the checkout is importable, and the allocator knows its setting, before torch is imported."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # large blocks of many sizes, by turns
    try:
        from gpu_bench import command
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        print(
            f"bench_gpu.py needs torch and transformers; {sys.executable} has no {error.name}. With another Python: "
            "make bench-gpu PYTHON=/path/to/python3",
            file=sys.stderr,
        )
        return 1
    return command.main()


if __name__ == "__main__":
    raise SystemExit(main())
