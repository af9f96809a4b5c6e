"""What every training outside of a search has: its texts, its folder, its milestones, and how it goes on.

Everything of a training lies beside its result: OUT is the trained checkpoint, OUT.training the token sequences and
the training checkpoints with what was measured. The same command run again goes on where it was stopped.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from attention.base.progress import ProgressStage, stage
from attention.base.text import compact
from attention.base.timing import clock, duration
from attention.checkpoint import Checkpoint
from attention.io import checkpoint
from attention.io.replacing import check_folder
from orchestrator import checkpoints
from orchestrator.cluster.placement import Demand
from orchestrator.cluster.room import concurrency
from orchestrator.cluster.session import connected, local_nodes, prepare_process, starts_ray
from orchestrator.cluster.tokenising import tokeniser
from orchestrator.config.schema import ConfigError, apply_train_options
from orchestrator.resources.size import Size
from orchestrator.resources.time import training_rate
from orchestrator.storage import records
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.storage.mirror import is_remote
from orchestrator.storage.paths import storage_path
from orchestrator.tracking.run_metadata import dataset_of
from orchestrator.training.tracked import TrackedTraining
from trainers.jobs.checkpoints import CheckpointStore
from trainers.jobs.curve import read_curve
from trainers.jobs.worker import TrainJob, run_training
from trainers.settings import TrainSettings
from trainers.text.data import SMALL_TEXT, TextCut, Texts, token_set
from trainers.text.token_sets import is_complete

POLL_SECONDS = 0.5
MEASURED = ("step", "loss", "train_loss", "tokens", "tokens_per_second", "seconds")
"""Of a milestone: losses in nats per token, speed of the training alone, seconds with all that lies between."""
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """A training, checked. `out`: absolute folder of the trained checkpoint; `eval_every`: steps between milestones;
    `train_tokens`: of text, which is seen again where the steps need more."""

    RUN: ClassVar[str]
    MARK: ClassVar[str]
    VERB: ClassVar[str]
    WORDS: ClassVar[str] = "a training"

    settings: TrainSettings
    steps: int
    eval_every: int
    train_data: str
    eval_data: str
    text_field: str = "text"
    train_tokens: int
    eval_tokens: int | None
    sequence_length: int
    out: Path

    @property
    def source(self) -> str:
        """The checkpoint that gives the tokenizer, and is not written to."""
        raise NotImplementedError

    @property
    def title(self) -> str:
        """What is trained, in a word or two."""
        raise NotImplementedError

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the model, in the dtype that it is written in."""
        raise NotImplementedError

    def make(self, eval_file: Path) -> dict[str, Any]:
        """Make what the job starts from; facts to remember of it, `parameters` among them. `eval_file`: held out."""
        raise NotImplementedError

    def job(self, **common: Any) -> TrainJob:
        """The job, from what `make` has made."""
        raise NotImplementedError

    @property
    def folder(self) -> Path:
        return self.out.with_name(f"{self.out.name}.training")

    @property
    def milestones(self) -> tuple[int, ...]:
        return (*range(self.eval_every, self.steps, self.eval_every), self.steps)

    @property
    def tokens(self) -> int:
        """Trained on in all steps."""
        return self.steps * self.settings.batch_size * self.sequence_length

    @property
    def epochs(self) -> str:
        return f"{self.tokens / self.train_tokens:.3g} epochs"

    @property
    def demand(self) -> Demand:
        return Demand(0, 0, *self.settings.shape[:3])

    @property
    def cuts(self) -> tuple[TextCut, TextCut]:
        """The text to train on and the held-out text."""
        texts = Texts(self.train_data, self.eval_data, self.text_field, self.settings.seed)
        length = self.sequence_length
        return texts.cut("train", self.train_tokens, length), texts.cut("eval", self.eval_tokens, length)

    def check_texts(self) -> None:
        """Raises DataError where there is too little text. What takes long to read is not read, and what an earlier
        start has tokenised neither."""
        tokenizer = checkpoints.load_tokenizer(self.source)
        for cut in self.cuts:
            cut.check()
            if cut.tokens <= SMALL_TEXT and not is_complete(cut.folder(tokenizer, self.folder / "data")):
                cut.in_memory(tokenizer)

    @property
    def mark(self) -> Path:
        """What the training depends on; later also what `make` remembers, and whether it has `finished`."""
        return self.folder / self.MARK

    @property
    def known(self) -> dict[str, Any]:
        """The mark of an earlier start of this very training; empty without one."""
        return read_json(self.mark) if self.mark.is_file() else {}

    def remember(self, **facts: Any) -> dict[str, Any]:
        known = self.to_dict() | self.known | facts
        write_json(self.mark, known)
        return known

    def reports(self) -> list[dict[str, Any]]:
        """What was measured so far."""
        return CheckpointStore(str(self.folder / "train"), self.RUN).read()[1]

    def to_dict(self) -> dict[str, Any]:
        """Plain values: everything that the result depends on."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "out"}
        return {**record, "settings": self.settings.model_dump()}

    def check_folders(self, overwrite: bool) -> None:
        """Raises ConfigError or OutputError unless `out` may be written, or holds this very training."""
        if not self.mark.is_file():
            check_folder(self.out, overwrite=overwrite, reads=[self.source])
            check_folder(self.folder, reads=[self.source])
            return
        plain = {f.name: f.default for f in fields(self) if f.default is not MISSING}  # of a field that came later
        record, known = self.to_dict(), plain | self.known
        if changed := [name for name in record if known.get(name) != json.loads(json.dumps(record[name]))]:
            raise ConfigError(
                f"out: {self.folder} holds {self.WORDS} with another {', '.join(changed)}; give another --out, or "
                "remove that folder to start over"
            )
        if known.get("finished") and not self.out.is_dir():
            raise ConfigError(f"out: {self.out} was trained and is gone; remove {self.folder} to train it again")
        if not self.finished():
            check_folder(self.out, overwrite=True, reads=[self.source])

    def finished(self) -> bool:
        """Whether an earlier start has finished it, its weights being as they were written."""
        digest = self.known.get("weights_digest")
        return bool(self.known.get("finished")) and digest == checkpoint.weights_digest(self.out)

    def carry_out(self, progress: Progress, after: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Train, or what is left of it; `progress` is told each milestone in words. `after` makes of the last report
        what is remembered, `weights_digest` among it, with `out` in place. Returns what is remembered."""
        of_text = f"{self.tokens} tokens ({self.epochs} of the text)"
        progress(f"training: {self.title}, {self.steps} steps, {of_text}; in {self.folder}")
        if self.finished():
            return self.known
        self.check_texts()
        if starts_ray():
            concurrency(local_nodes(), self.demand)
        prepare_process()
        with connected() as nodes:
            concurrency(nodes, self.demand)
            job = self._prepared()
            with self._told(progress, self._tracked(job)):
                metrics = run_training(job)
        return self.remember(**after(metrics), finished=True)

    def rehearse(self, overwrite: bool) -> dict[str, str]:
        """What `carry_out` would do, in words by what they are about, after all that is checked without a cluster.
        Nothing is written. Raises what `check_folders` does, and ConfigError where the machine is too small."""
        self.check_folders(overwrite)
        self.check_texts()
        train, config = self.settings, Checkpoint.open(self.source).config
        if starts_ray():
            concurrency(local_nodes(), self.demand)
        size = Size.of(config)
        rate, source = training_rate(config, train, self.sequence_length, size)
        speed, hours = "", ""
        if rate:
            speed, about = f"{rate:.0f} tokens/s a worker, ", duration(self.tokens / rate / train.num_workers)
            hours = f"; about {about}, starts and measurements left out"
        return {
            "training": f"{self.title}, {self.steps} steps, {compact(self.tokens)} tokens ({self.epochs} of the text)",
            "model": f"{compact(size.total)} parameters, composition left out, as {Path(self.source).name} has them",
            "text": f"{self.train_data} to train on, {self.eval_data} to measure on",
            "rate": f"{speed}{source}{hours}",
            "results": f"{self.out}, and beside it {self.folder.name}",
        }

    def _prepared(self) -> TrainJob:
        """The job, with its model and its texts on disk; those of an earlier start are taken as they are."""
        self.remember()  # first, so that what a kill leaves is known as ours
        tokenizer = checkpoints.load_tokenizer(self.source)
        train_file, eval_file = (
            token_set(cut, tokenizer, self.folder / "data", tokenise=tokeniser(self.source, cut.tokens))
            for cut in self.cuts
        )
        if "parameters" not in self.known:
            self.remember(**self.make(Path(eval_file)))
        return self.job(
            train_file=str(train_file),
            eval_file=str(eval_file),
            storage_path=str(self.folder / "train"),
            run_name=self.RUN,
            milestones=self.milestones,
            settings=self.settings,
            seed=self.settings.seed,
        )

    @contextmanager
    def _told(self, progress: Progress, tracked: TrackedTraining) -> Iterator[None]:
        """While the body runs, show how far it has come, and tell each milestone as it comes, those of an earlier start
        as well; MLflow too."""
        ended = threading.Event()

        def watch(told: ProgressStage) -> None:
            shown, started, last_look = 0, time.time(), False
            while not last_look:
                last_look = ended.wait(POLL_SECONDS)
                points = self.reports()
                for point in points[shown:]:
                    progress(_line(point, self.steps))
                shown = len(points)
                lines = read_curve(self.folder / "train" / self.RUN)
                curve = [line["step"] for line in lines if line["time"] > started]
                if curve and told.start < curve[0]:
                    told.begin(curve[0])  # until its first step workers and libraries have started
                told.to(max([point["step"] for point in points] + curve, default=0))
                tracked.tell(self._points())

        before = max((point["step"] for point in self.reports()), default=0)
        with stage("training", self.steps, "steps", start=before) as told:
            watcher = threading.Thread(target=watch, args=(told,), daemon=True)
            watcher.start()
            status = records.FAILED
            try:
                yield
                status = records.DONE
            except (KeyboardInterrupt, SystemExit):
                status = records.KILLED
                raise
            finally:
                ended.set()
                watcher.join()
                tracked.tell(self._points(), status)

    def _tracked(self, job: TrainJob) -> TrackedTraining:
        """Its run in MLflow."""
        texts = {"train": (self.train_data, job.train_file), "eval": (self.eval_data, job.eval_file)}
        own = {"base_model": Path(self.source).name, "steps": self.steps, "sequence_length": self.sequence_length}
        params = own | self.settings.model_dump(mode="json")
        datasets = [dataset_of(split, *text) for split, text in texts.items()]
        return TrackedTraining(self.VERB, self.out, self.title, params, datasets)

    def _points(self) -> list[dict[str, Any]]:
        """What was measured: before the first step, at the milestones, and every few seconds in between."""
        lines = [*self.reports(), *read_curve(self.folder / "train" / self.RUN)]
        first: dict[str, Any] = {"step": 0, "time": self.mark.stat().st_ctime, "loss": self.known.get("loss_before")}
        return [first | {"kv_bytes_per_token": self.kv_bytes_per_token}, *lines]

    def measured(self) -> list[dict[str, Any]]:
        """Of each milestone what is shown of it."""
        return [{name: point[name] for name in MEASURED} for point in self.reports()]


def _line(point: dict[str, Any], steps: int) -> str:
    step, seconds = point["step"], point["seconds"]
    end = f"{clock(seconds * (steps - step) / step)} left" if step < steps else f"in {clock(seconds)}"
    return (
        f"training: {step} of {steps} steps, {end}; held-out loss {point['loss']:.3f}, training loss "
        f"{point['train_loss']:.3f}, {point['tokens_per_second']:.0f} tokens/s"
    )


def train_record(
    record: dict[str, Any], overrides: Sequence[str], learning_rate: float, seed: int, device: str
) -> dict[str, Any]:
    """`record` with the overrides (`train.KEY=VALUE`, ...) and the options that have a flag of their own. Raises
    ConfigError for one that is given both ways."""
    record = apply_train_options(record, overrides, learning_rate, seed)
    if isinstance(record["train"], dict):
        gpus = float(checkpoints.device_of(device).type == "cuda")
        record["train"] = {"gpus_per_worker": gpus} | record["train"]
    return record


def spans(steps: int, eval_every: int | None) -> int:
    """Steps between milestones, by default a tenth. Raises ConfigError for what is not at least 1."""
    eval_every = max(1, steps // 10) if eval_every is None else eval_every
    for name, value in (("steps", steps), ("eval_every", eval_every)):
        if value < 1:
            raise ConfigError(f"{name}: got {value}; it must be at least 1")
    return eval_every


def result_folder(out: str | Path) -> Path:
    """Absolute. Raises ConfigError for an address, where no checkpoint can be written."""
    if is_remote(str(out)):
        raise ConfigError(f"out: got {str(out)!r}; it must be a folder of this machine or one that it mounts")
    return storage_path(str(out))


def absolute(model: str | Path) -> str:
    """A folder by its absolute path, a hub name as it is."""
    return str(Path(model).absolute()) if Path(model).is_dir() else str(model)
