"""Start time of the command line for requests that need no model: `--help`, and typing errors."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.report import Row, Scale, benchmark

REPOSITORY = Path(__file__).resolve().parent.parent
HEADFOLD = [sys.executable, "-m", "orchestrator.main"]
ANSWERS = {
    "headfold --help": ["--help"],
    "headfold convert --help": ["convert", "--help"],
    "an unknown option": ["convert", "--modle", "x"],
    "an unknown key of a configuration": ["search", "configs/demo.yaml", "search.num_samplez=4"],
}


@benchmark("start", devices=("cpu",))
def start(scale: Scale) -> Iterator[Row]:
    """Answers that need no model: processor time of the process against that of a Python that does nothing."""
    commands = {"python": [sys.executable, "-c", "pass"]}
    commands |= {name: [*HEADFOLD, *arguments] for name, arguments in ANSWERS.items()}
    times = _process_seconds(commands, scale.pick(1, 9))
    for name in ANSWERS:
        yield Row(name, 1e3 * times[name], 1e3 * times["python"], "ms", "a process from its start to its end")


def _process_seconds(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, float]:
    """Median processor seconds of each command, which take turns; the first turn compiles and does not count."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if turn:
                times[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {name: statistics.median(seconds) for name, seconds in times.items()}
