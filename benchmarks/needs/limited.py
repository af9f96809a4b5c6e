"""A function in a separate process that cannot have more anonymous memory than a limit.

It needs no rights and no control group, and is set once the libraries are there. Anonymous resident
memory is checked every hundredth of a second, and a process that has more than the limit ends. What
is faster than that RLIMIT_DATA refuses: of what is mapped privately and writable, as large a limit,
and room for what is counted there and is not anonymous memory: what the libraries have mapped and
never touched (a gigabyte for Ray's threads), and the files of checkpoints, which safetensors maps
like that.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention.base.memory import kernel_field

LOOK_SECONDS = 0.01
BROKEN = "more anonymous memory than the limit"
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Limited:
    """The result of a process: the return value of the function, and the most anonymous memory in bytes."""

    answer: Any
    peak: int


def run_limited(
    folder: Path, function: Callable[..., Any], *arguments: Any, limit: float, files: int = 0, ranks: int = 1
) -> list[Limited]:
    """`function(*arguments)` in a process with at most `limit` bytes, in the new `folder`; with several `ranks` in as
    many that can meet (RANK, WORLD_SIZE). `files`: bytes of checkpoints that may be mapped in
    addition. Raises RuntimeError, with its last output, if one fails."""
    folder.mkdir(parents=True)
    (folder / "call").write_bytes(pickle.dumps((function, arguments, int(limit), files, str(folder / "meeting"))))
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "WORLD_SIZE": str(ranks)}
    running = []
    for rank in range(ranks):
        environment = os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"said-{rank}").open("wb") as output:
            command = [sys.executable, "-m", "benchmarks.needs.limited", str(folder)]
            running.append(subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output))
    _wait(running, folder)
    return [pickle.loads((folder / f"answer-{rank}").read_bytes()) for rank in range(ranks)]


def _wait(running: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until all have finished; as soon as one fails the others, which wait for it, are stopped."""
    waiting = dict(enumerate(running))
    try:
        while waiting:
            for rank, process in list(waiting.items()):
                with suppress(subprocess.TimeoutExpired):
                    if process.wait(timeout=0.2):
                        output = (folder / f"said-{rank}").read_text(errors="replace")[-3000:]
                        raise RuntimeError(f"rank {rank} of {folder.name} exited with {process.returncode}: {output}")
                    del waiting[rank]
    finally:
        for process in waiting.values():
            process.kill()
            process.wait()


def _anonymous() -> int:
    return kernel_field("/proc/self/status", "RssAnon")


def _carry_out(folder: Path) -> None:
    function, arguments, limit, files, meeting = pickle.loads((folder / "call").read_bytes())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "trainers" in function.__module__ or ranks > 1 or hasattr(function, "trains"):
        import torch.distributed as dist

        import trainers.engine  # noqa: F401 - its libraries are there before the limit

        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    untouched = kernel_field("/proc/self/status", "VmData") - _anonymous()
    resource.setrlimit(resource.RLIMIT_DATA, (limit + untouched + files,) * 2)
    peak, over = _anonymous(), threading.Event()

    def look() -> None:
        nonlocal peak
        while not over.wait(LOOK_SECONDS):
            peak = max(peak, _anonymous())
            if peak > limit:
                print(f"{BROKEN}: {peak} bytes, {limit} are allowed", file=sys.stderr, flush=True)
                faulthandler.dump_traceback()
                os._exit(1)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        answer = function(*arguments)
    finally:
        over.set()
        looking.join()
    (folder / f"answer-{rank}").write_bytes(pickle.dumps(Limited(answer, peak)))


if __name__ == "__main__":
    # Under the module's own name, so that pickled objects can be loaded elsewhere
    from benchmarks.needs.limited import _carry_out as carry_out

    carry_out(Path(sys.argv[1]))
