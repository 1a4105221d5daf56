"""Compare a checkpoint that shares prompts with the same checkpoint that doesn't: `zorro-verl verify` from a clone.

python scripts/verify_equivalence.py --model /path/to/checkpoint --dtype float32
"""

import typer

from zorro_verl.cli import verify

if __name__ == "__main__":
    typer.run(verify)
