"""`headfold estimate` compared with what conversions take: seconds of the whole command, its peak memory, and the
bytes that it writes.

    python -m benchmarks estimates --threads 2 [--quick]

On a machine with nothing else to do; the time left that `convert` shows rests on the same numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.models import llama
from benchmarks.needs.memory import DEMO, GIGA, NARROW, random_checkpoint, verbs
from benchmarks.report import Row, Scale, benchmark

EXAMPLE = DEMO.parent / "prose-code-qwen3"
"""A model of another family and another text, with grouped queries."""
EXAMPLE_RUNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("headfold_gqa", "0.5", ()),
    ("headfold_layers", "0.5", ()),
)
WIDER = {"num_attention_heads": 16, "head_dim": 64, "intermediate_size": 2816, "vocab_size": 8192}
DEMO_RUNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("gqa", "0.5", ()),
    ("align", "0.5", ()),
    ("least_squares", "0.25", ()),
    ("headfold_gqa", "0.5", ()),
    ("headfold_gqa", "0.25", ("--calibration-tokens", "32768")),
    ("headfold_layers", "0.5", ()),
    ("headfold", "0.25", ()),
    ("headfold_gqa", "0.5", ("--layerwise",)),
)


def timed(arguments: Sequence[str]) -> tuple[float, float]:
    """Seconds and peak resident GiB of a separate command. Raises RuntimeError if it fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "orchestrator.main", *arguments]
    none, started = subprocess.DEVNULL, time.perf_counter()
    process = subprocess.Popen(command, env=environment, cwd=DEMO.parents[1], stdout=none, stderr=none)
    _, status, usage = os.wait4(process.pid, 0)
    seconds, process.returncode = time.perf_counter() - started, os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} exited with {process.returncode}")
    return seconds, usage.ru_maxrss * 1024 / GIGA


@benchmark("estimates", devices=("cpu",))
def estimates(scale: Scale) -> Iterator[Row]:
    """Seconds and memory of conversions against the estimate made before each."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        runs = [("demo", DEMO, *run) for run in scale.pick(DEMO_RUNS[:1], DEMO_RUNS)]
        runs += [("Qwen3 example", EXAMPLE, *run) for run in scale.pick((), EXAMPLE_RUNS)]
        for name, sizes in scale.pick((), (("random, hidden 512", NARROW), ("random, hidden 1024", WIDER))):
            random_checkpoint(llama(2, sizes, tie_word_embeddings=False), folder / name)
            runs.append((name, folder / name, "headfold_gqa", "0.5", ("--layerwise",)))
        for number, (name, model, recipe, ratio, options) in enumerate(runs):
            same = ["--model", str(model), "--recipe", recipe, "--kv-ratio", ratio]
            layerwise = "--layerwise" in options
            sizes = [option for option in options if option != "--layerwise"]
            verbs(["estimate", *same, *sizes, "--json", str(folder / "said.json")])
            estimate = json.loads((folder / "said.json").read_text(encoding="utf-8"))
            way = ["--layerwise"] if layerwise else ["--no-layerwise"]
            out = folder / f"out-{number}"
            seconds, peak = timed(["convert", *same, *sizes, *way, "--out", str(out)])
            what = f"{name}: {recipe} {ratio}{' ' + ' '.join(options) if options else ''}"
            estimated = estimate["seconds"] + estimate["shared_flops"] / estimate["rate"]
            yield Row(f"{what}, time", seconds, estimated, "s")
            yield Row(f"{what}, memory", peak, estimate["layerwise" if layerwise else "resident"] / GIGA, "GiB")
            written = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
            yield Row(f"{what}, disk", written / 2**20, estimate["disk"] / 2**20, "MiB")
