"""Memory and time of making a token set of 100 million tokens and of reading it, against one of 20 million.

    python -m benchmarks texts [--quick]

The text is generated. Each set is made on a separate Ray of two CPUs, whose peaks are read at the
end, and then streamed once by a worker in another process.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, Scale, benchmark

DEMO = Path(__file__).resolve().parents[2] / "examples" / "stdlib-llama"
LENGTH = 512
MEGA = 2.0**20
CPUS = 2


def write_text(file: Path, megabytes: float) -> None:
    """Documents of random words, about three bytes per token of the demo's vocabulary, one per line."""
    generator = np.random.default_rng(0)
    words = np.array(["".join(generator.choice(list("etaoinsrhl"), size)) for size in generator.integers(2, 9, 5000)])
    with file.open("w", encoding="utf-8") as stream:
        while stream.tell() < megabytes * 1e6:
            for size in generator.integers(50, 1500, 200):
                stream.write(json.dumps({"text": " ".join(generator.choice(words, size))}) + "\n")


def make(source: str, tokens: int, cache: str) -> dict[str, Any]:
    """Make the set on a separate Ray of CPUS CPUs. Bytes of memory at the peak: of this process, the largest of the
    others."""
    import ray

    from attention.base.memory import memory_peak
    from attention.io.tokenizers import read_tokenizer
    from orchestrator.cluster.tokenising import tokenise_on_cluster
    from trainers.text.data import TextCut, token_set
    from trainers.text.token_sets import read_sequences

    def peak_there() -> int:
        time.sleep(1)  # so that each process has one
        return memory_peak()

    ray.init(address="local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    began, cut = time.perf_counter(), TextCut(source, "train", tokens, LENGTH)
    folder = token_set(cut, read_tokenizer(DEMO), cache, tokenise=tokenise_on_cluster(str(DEMO)))
    seconds = time.perf_counter() - began
    others = ray.get([ray.remote(num_cpus=1)(peak_there).remote() for _ in range(CPUS)])
    digest = read_sequences(folder).digest
    return {"folder": str(folder), "digest": digest, "seconds": seconds, "own": memory_peak(), "others": max(others)}


def stream(folder: str) -> dict[str, Any]:
    """Read one epoch as one worker of four. Returns bytes of memory at its peak."""
    from attention.base.memory import memory_peak
    from trainers.text.data import BatchStream
    from trainers.text.token_sets import read_sequences

    sequences = read_sequences(folder)
    began, batches = time.perf_counter(), BatchStream(sequences, 32, rank=1, world_size=4)
    for _ in range(len(sequences) // 32):
        batches.next()
    return {"own": memory_peak(), "seconds": time.perf_counter() - began}


PROCESS = """
import json, sys
from benchmarks.needs import texts
print(json.dumps(getattr(texts, sys.argv[1])(*json.loads(sys.argv[2]))))
"""


def process(function: str, *arguments: Any) -> subprocess.Popen[str]:
    """`make` or `stream` in a separate process, whose last line is the result."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", PROCESS, function, json.dumps(arguments)]
    return subprocess.Popen(command, env=environment, cwd=DEMO.parents[1], stdout=subprocess.PIPE, text=True)


def result(started: subprocess.Popen[str]) -> dict[str, Any]:
    """Raises CalledProcessError if it has failed."""
    output = started.communicate()[0]
    if started.returncode:
        raise subprocess.CalledProcessError(started.returncode, started.args, output)
    return json.loads(output.splitlines()[-1])


@benchmark("texts", devices=("cpu",))
def texts(scale: Scale) -> Iterator[Row]:
    """Peak memory of tokenising and of reading a small and a large token set."""
    few, many = scale.pick((200_000, 2_000_000), (20_000_000, 100_000_000))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "text.jsonl"
        write_text(source, 4e-6 * many)
        small, large = (result(process("make", str(source), count, folder)) for count in (few, many))
        read_small, read_large = (result(process("stream", corpus["folder"])) for corpus in (small, large))
    about, rate = f"{many / 1e6:g}M tokens against {few / 1e6:g}M", many / large["seconds"] / 1e3
    each = read_large["seconds"] / (many / LENGTH / 4) * 1e6
    yield Row("peak of the process that reads and writes", large["own"] / MEGA, small["own"] / MEGA, "MiB", about)
    yield Row("peak of a process that tokenises", large["others"] / MEGA, small["others"] / MEGA, "MiB", about)
    yield Row("peak of a worker, one epoch", read_large["own"] / MEGA, read_small["own"] / MEGA, "MiB", about)
    yield Row("tokenising", large["seconds"], None, "s", f"{CPUS} processes, {rate:.0f}k tokens/s")
    yield Row("reading a sequence", each, None, "us", f"{LENGTH} tokens, a worker of four")
