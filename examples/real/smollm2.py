"""Convert SmolLM2-135M-Instruct to two thirds and half of its KV cache, and load the results in llama.cpp.

    python examples/real/smollm2.py [--quick] [--folder FOLDER]

The model is downloaded (94 MiB, Apache-2.0). These are the parts `fetch` and `defaults` of `make real`, which measures
more of it; the options are those of `python -m benchmarks.real`, and the numbers are in docs/real.md.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    parts = ["--only", "fetch", "--only", "defaults"]
    command = [sys.executable, "-m", "benchmarks.real", *parts, *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=Path(__file__).resolve().parents[2], check=False).returncode)
