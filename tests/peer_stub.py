"""A contestant for the driver of scripts/bench_peers.py that computes nothing: its name says how it behaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def spoil(name: str, results: dict[str, np.ndarray]) -> None:
    match name:
        case "off-log-prob":
            results["log_probs"][1] += 1e-3
        case "off-gradient":
            results["weight"][1, 1] *= 1.001
        case "nan":
            results["weight"][0, 0] = np.nan
        case "short":
            results["log_probs"] = results["log_probs"][:-1]
        case "partial":
            del results["bias"]


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "crashes":
        raise SystemExit("ModuleNotFoundError: no module named attention")
    steps = 0
    for line in sys.stdin:
        if line == "compare\n":
            results = {
                "log_probs": np.array([-1.0, -2.0, -3.0], np.float32),
                "weight": np.ones((2, 2), np.float32),
                "bias": np.zeros(2, np.float32),
            }
            spoil(name, results)
            if name != "silent":
                save_file(results, folder / f"{name}.safetensors")
            answer = {"peak_bytes": 2**20, "versions": "stub 1"}
        else:
            steps += 1
            if name == "crashes-later" and steps == 2:
                raise SystemExit("out of memory")
            seconds = 0.25 if name == "fast" else 1.0
            answer = {"wall": seconds, "cpu": seconds}
        sys.stdout.write("Setting up\n" if name == "talks" else json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
