"""Run as a script: relaxation stages in separate worker processes, one of which dies by SIGKILL and restarts.

`python killed_relaxations.py FOLDER` reads `cases.json` there, a list of {"name", "job"}, `job` being a
TrainJob as JSON. Each case runs twice: as it is, in FOLDER/NAME/whole, and killed after its first saved state and
started again, in FOLDER/NAME/killed. Prints how the workers of each attempt ended.

The libraries are imported once; the workers are forks of this process, which itself trains nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import trainers.relaxing
from attention.base.memory import freeze_garbage
from benchmarks.needs.alone import Alone
from trainers.jobs.train_job import TrainJob

FORK = multiprocessing.get_context("fork")


def work(job: TrainJob, rank: int, meeting: Path, dies: bool) -> None:
    """One worker. If it dies, the last of them kills itself as soon as the first state has been saved."""
    torch.set_num_threads(1)
    world = job.settings.num_workers
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    if job.settings.zero_stage == 3:  # even the smallest parameter is split
        small = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
        job = replace(job, settings=job.settings.model_copy(update={"deepspeed": small}))
    if dies and rank == world - 1:
        address = job.checkpoint_address
        saved = Path(f"{job.out_dir}.relaxed" if address is None else address.removeprefix("file://"))
        threading.Thread(target=die_once_there_is, args=(saved,), daemon=True).start()
    trainers.relaxing.relax(job, Alone(rank, world))
    dist.destroy_process_group()


def die_once_there_is(folder: Path) -> None:
    while not any(
        Path(parent).name == "states" and "checkpoints.json" in names
        for parent, _, names in os.walk(folder)  # and not glob: it raises where a folder is renamed meanwhile
    ):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def run(job: TrainJob, folder: Path, attempt: int, dies: bool = False) -> list[int | None]:
    """All workers of one attempt; when one dies the others are ended too. Their exit codes."""
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / f"meeting-{attempt}"
    workers = [
        FORK.Process(target=work, args=(replace(job, out_dir=str(folder / "out")), rank, meeting, dies))
        for rank in range(job.settings.num_workers)
    ]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        if any(worker.exitcode not in (None, 0) for worker in workers):
            for worker in workers:
                worker.kill()
        time.sleep(0.02)
    for worker in workers:
        worker.join()
    return [worker.exitcode for worker in workers]


def main(folder: Path) -> None:
    freeze_garbage()  # else each fork copies the memory of all libraries as soon as it collects
    ends: dict[str, Any] = {}
    for case in json.loads((folder / "cases.json").read_text()):
        name, job = case["name"], TrainJob.from_json(case["job"])
        ends[name] = {
            "whole": run(job, folder / name / "whole", 0),
            "killed": run(job, folder / name / "killed", 0, dies=True),
            "unfinished": not list((folder / name / "killed").rglob("outcome.json")),
            "again": run(job, folder / name / "killed", 1),
        }
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
