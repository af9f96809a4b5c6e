"""One part in a separate process: `python -m benchmarks.gpu.child NAME DEVICE FILE`; rows are appended to FILE.

`--card` instead of a name writes the description of the device. An engine's name at the end replaces vLLM's.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any


def main(name: str, device_name: str, file: Path, engine: str = "vllm") -> None:
    import torch

    if device_name == "cuda" and not torch.cuda.is_available():
        sys.exit(
            "make gpu: torch sees no CUDA device here; on a machine with one, or to see that all parts run: "
            "make gpu DEVICE=cpu"
        )
    from benchmarks.gpu.devices import card, opened
    from benchmarks.report import versions

    answer: dict[str, Any] = {"rows": []}

    def write() -> None:
        file.write_text(json.dumps(answer), encoding="utf-8")

    if name == "--card":
        answer["card"] = card(device_name) | {"software": versions()}
        write()
        return
    from benchmarks.gpu.parts import PARTS, Skipped, served

    run = partial(served, engine) if name == "vllm" else PARTS[name]
    with opened(device_name) as device:
        try:
            for row in run(device):
                answer["rows"].append(asdict(row))
                write()
                print(f"gpu: {name}: {row.name}: {row.value:.4g} {row.unit} {row.note}", file=sys.stderr, flush=True)
        except Skipped as reason:
            answer["skipped"] = str(reason)
    write()


if __name__ == "__main__":
    from attention.base.progress import show_progress

    words = sys.argv[1:]
    with show_progress(f"gpu: {words[0]}"):
        main(words[0], words[1], Path(words[2]), *words[3:])
