"""Compare a checkpoint that shares prompts with the same checkpoint that doesn't: `zorro-verl verify` from a clone.

python scripts/verify_equivalence.py /path/to/checkpoint --dtype float32
"""

import sys

from zorro_verl.cli import app

if __name__ == "__main__":
    app(["verify", *sys.argv[1:]], prog_name="zorro-verl")
