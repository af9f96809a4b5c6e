"""Seconds from a trial's start to its first DeepSpeed step: the worker pool against a Ray Train run for each trial.

    python -m benchmarks worker-pool [--quick]

Both inside Ray Tune, one trial at a time, in one Ray of this machine. The first trial on a group of
the pool starts it, and has a separate row.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.report import Row, Scale, benchmark
from orchestrator import checkpoints
from orchestrator.cluster.session import connected
from orchestrator.search.candidates import Candidate
from orchestrator.search.trials.context import TrialContext
from orchestrator.search.trials.trial import run_trial
from orchestrator.storage.json_files import read_json, write_json
from search_spaces.recipes.catalogue import recipe
from trainers.jobs.checkpoints import CheckpointStore
from trainers.settings import TrainSettings
from trainers.text.data import TextCut, read_sequences, token_set

DEMO = Path(__file__).resolve().parents[1] / "examples" / "stdlib-llama"
SETTLED = 20  # jobs after which a worker's memory counts as settled


@dataclass(frozen=True)
class Times:
    """Times of one trial, in seconds from its start: when rung 0 was reported, its first step, its end. `handed`: from
    the end of rung 0 to its first step."""

    first_step: float
    handed: float
    end: float


def demo_context(folder: Path, workers: int, rungs: tuple[int, ...]) -> TrialContext:
    """Short trials of the demo checkpoint."""
    tokenizer = checkpoints.load_tokenizer(str(DEMO))
    files = {
        cut.split: token_set(cut, tokenizer, folder / "data")
        for cut in (
            TextCut("stdlib", "train", 16_384, 64),
            TextCut("stdlib", "eval", 2048, 64),
            TextCut("stdlib", "calibration", 2048, 64),
        )
    }
    settings = TrainSettings(batch_size=4, num_workers=workers, cpus_per_worker=0.9 / workers)
    context = TrialContext(
        folder=str(folder),
        model=str(DEMO),
        dtype="float32",
        train_file=str(files["train"]),
        eval_file=str(files["eval"]),
        calibration_file=str(files["calibration"]),
        calibration_cache=str(folder / "calibration"),
        rungs=rungs,
        train=settings.model_dump(mode="json"),
        original_loss=2.0,
    )
    context.calibration(read_sequences(files["calibration"])[:])
    return context


def timed(config: dict[str, Any], context: TrialContext) -> None:
    """A trial that records its start and end."""
    from ray import tune

    started = time.time()
    note = Path(context.folder) / "times" / f"{tune.get_context().get_trial_id()}.json"
    candidate = Candidate(recipe("least_squares"), 0.25, 3e-4, seed=config["number"])
    run_trial(dict(candidate.config()), context)
    write_json(note, {"started": started, "ended": time.time()})


def trials(context: TrialContext, count: int) -> list[Times]:
    """Run trials one after the other under Ray Tune."""
    from ray import tune

    grid = {"number": tune.grid_search(list(range(count)))}
    trainable = tune.with_resources(tune.with_parameters(timed, context=context), {"CPU": 0.05})
    tuner = tune.Tuner(
        trainable,
        param_space=grid,
        tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=f"{context.folder}/tune", verbose=0),
    )
    results = tuner.fit()
    if results.errors:
        raise results.errors[0]
    notes = sorted(Path(context.folder, "times").glob("*.json"), key=lambda note: read_json(note)["started"])
    return [_times(context, note.stem, **read_json(note)) for note in notes]


def _times(context: TrialContext, trial: str, started: float, ended: float) -> Times:
    reports = CheckpointStore(f"{context.folder}/train", trial).read()[1]
    first = reports[0]["first_step_at"] if reports else ended
    facts = Path(context.folder) / "trials" / trial / "facts.json"  # written when rung 0 is over
    return Times(first - started, first - facts.stat().st_mtime, ended - started)


def memory(pid: int) -> float:
    """Resident memory of a process in MB."""
    fields = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").split("VmRSS:")[1].split()
    return int(fields[0]) / 1000


def worker_process() -> int:
    """Process id of a worker that stands."""
    from ray.util.state import list_actors

    alive: list[Any] = list_actors(filters=[("state", "=", "ALIVE")])
    return next(int(actor.pid) for actor in alive if "TrainWorker" in actor.class_name)


@benchmark("worker-pool", devices=("cpu",))
def worker_pool(scale: Scale) -> Iterator[Row]:
    """Seconds to a trial's first training step on workers of the pool against separate workers."""
    from orchestrator.cluster.pool_client import open_pool

    workers, plain_trials, warm_trials = scale.pick((1, 1, 3), (2, 4, 101))
    with connected(), tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        context = demo_context(root / "plain", workers, (0, 1, 2))
        plain = trials(context, plain_trials)[-max(1, plain_trials - 1) :]
        reserved: list[float] = []
        with open_pool(str(root / "groups")) as pool:
            first = trials(replace(context, folder=str(root / "start"), pool=pool), 1)
            worker = worker_process()
            counts = [min(SETTLED, warm_trials - 1), warm_trials - 1 - min(SETTLED, warm_trials - 1)]
            times: list[Times] = []
            for index, count in enumerate(c for c in counts if c):
                times += trials(replace(context, folder=str(root / f"pool-{index}"), pool=pool), count)
                reserved.append(memory(worker))
        alone = trials(replace(context, folder=str(root / "rung0"), rungs=(0,)), scale.pick(2, 8))[1:]

    def median(of: list[Times], what: str) -> float:
        return statistics.median(getattr(time, what) for time in of)

    about = f"demo, {workers} worker(s), ZeRO 1, medians of {len(times)} and {len(plain)} trials"
    rival = median(plain, "first_step")
    yield Row("start of a trial to its first step", median(times, "first_step"), rival, "s", about)
    yield Row("end of rung 0 to the first step", median(times, "handed"), median(plain, "handed"), "s")
    yield Row("whole trial, 2 steps", median(times, "end"), median(plain, "end"), "s")
    yield Row("a trial that ends at rung 0, against a first step", median(alone, "end"), rival, "s")
    yield Row("the first trial of a group", first[0].first_step, rival, "s", "starts the group")
    if len(reserved) > 1:
        yield Row(f"memory of a worker after {len(times)} trials, against {SETTLED}", reserved[1], reserved[0], "MB")
