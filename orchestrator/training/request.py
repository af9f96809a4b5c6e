"""The parts of every training outside of a search: texts, a folder, milestones, and resuming.

All files of a training are next to its result: OUT is the trained checkpoint, OUT.training the
token sequences and the training checkpoints with the measurements. The same command run again
resumes a stopped training.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypedDict

from attention.io import checkpoint
from attention.io.replacing import check_folder
from attention.io.sources import source_name, source_note
from orchestrator import checkpoints
from orchestrator.cluster.placement import Demand
from orchestrator.cluster.tokenising import tokeniser
from orchestrator.config.schema import ConfigError
from orchestrator.storage.json_files import read_if_there, write_json
from orchestrator.storage.mirror import is_remote
from orchestrator.storage.paths import storage_path
from orchestrator.training.run import TrainingReport
from trainers.jobs.checkpoints import CheckpointStore
from trainers.jobs.train_job import TrainJob
from trainers.settings import TrainSettings
from trainers.text.data import SMALL_TEXT, TextCut, Texts, read_sequences, token_set
from trainers.text.token_sets import is_complete


class Milestone(TypedDict):
    """The measurements at a milestone. Losses are in nats per token."""

    step: int
    loss: float
    train_loss: float
    tokens: int
    tokens_per_second: float
    """Speed of the training alone."""
    seconds: float
    """Time including measurements and checkpoints."""


class TrainingRecord(Milestone):
    """The common JSON of `headfold train` and of `headfold finetune`.

    The last milestone is in it.
    """

    settings: Mapping[str, Any]
    """`trainers.settings.TrainSettings`."""
    steps: int
    eval_every: int
    train_data: str
    eval_data: str
    text_field: str
    train_tokens: int
    eval_tokens: int | None
    sequence_length: int
    out: str
    seed: int
    learning_rate: float
    parameters: int
    weights_digest: str
    milestones: list[Milestone]


@dataclass(frozen=True, kw_only=True)
class TrainingRequest(ABC):
    """A training, checked.

    Attributes:
        NAME: Of its Ray Train run, and of the file that says what the training depends on.
        VERB: Whose training it is.
        KEEPS_BEST: Whether the best measured step is shipped, and not the last one.
        eval_every: Steps between milestones.
        train_tokens: Of text, which is seen again where the steps need more.
        out: Absolute folder of the trained checkpoint.
        checkpoint_minutes: After which there is a training checkpoint at the latest.
    """

    NAME: ClassVar[str]
    VERB: ClassVar[str]
    KEEPS_BEST: ClassVar[bool] = False

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
    checkpoint_minutes: float

    @property
    @abstractmethod
    def source(self) -> str:
        """The checkpoint that gives the tokenizer, and is not written to."""

    @property
    @abstractmethod
    def title(self) -> str:
        """The subject of the training, in a word or two."""

    @property
    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Bytes of the model, in the dtype of the written weights."""

    @property
    @abstractmethod
    def start_dir(self) -> str:
        """The folder of the weights that the job starts from, once `prepare` has made them."""

    @property
    def teacher_dir(self) -> str | None:
        """The folder of the model that is distilled from."""
        return None

    @property
    def trained_dir(self) -> Path:
        """The output folder of the job."""
        return self.out

    @property
    def models(self) -> Mapping[str, str]:
        """What the training reads weights of, by the option that names it."""
        return {}

    @abstractmethod
    def prepare(self, eval_file: Path) -> Mapping[str, Any]:
        """Make what the job starts from.

        Returns:
            Facts for the mark, `parameters` among them.
        """

    @abstractmethod
    def ship(self, last: TrainingReport) -> Mapping[str, Any]:
        """Put the trained checkpoint in place.

        Returns:
            Facts for the mark, `weights_digest` among them.
        """

    # ---- sizes -----------------------------------------------------------------------------------

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

    # ---- texts and job ---------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.out.with_name(f"{self.out.name}.training")

    @property
    def cuts(self) -> tuple[TextCut, TextCut]:
        """The text to train on and the held-out text."""
        texts = Texts(self.train_data, self.eval_data, self.text_field, self.settings.seed)
        length = self.sequence_length
        train = texts.cut("train", self.train_tokens, length)
        return train, texts.cut("eval", self.eval_tokens, length)

    def check_texts(self) -> None:
        """Raise DataError where there is too little text.

        Texts that take long to read are not read, nor those that an earlier start has tokenised.
        """
        tokenizer = checkpoints.load_tokenizer(self.source)
        for cut in self.cuts:
            cut.check()
            tokenised = is_complete(cut.folder(tokenizer, self._data))
            if cut.tokens <= SMALL_TEXT and not tokenised:
                cut.in_memory(tokenizer)

    def make_job(self) -> TrainJob:
        """Return the job, with its model and its texts on disk.

        Those of an earlier start are taken as they are.
        """
        # First, so that what a kill leaves is known as ours
        self.note(**({} if self.mark else {"id": uuid.uuid4().hex, "begun": time.time()}))
        tokenizer = checkpoints.load_tokenizer(self.source)
        train_file, eval_file = (
            token_set(cut, tokenizer, self._data, tokenise=tokeniser(self.source, cut.tokens))
            for cut in self.cuts
        )
        texts = [read_sequences(file).digest for file in (train_file, eval_file)]
        if self.mark.get("texts", texts) != texts:
            raise self._of_other_inputs(["text"])
        begun = "parameters" in self.mark
        if not begun:
            self.note(texts=texts, **self.prepare(Path(eval_file)))
        if not begun or "inputs" in self.mark:  # not of what was begun without them
            self.note(inputs=self._inputs())
        return TrainJob(
            model_dir=self.start_dir,
            teacher_dir=self.teacher_dir,
            train_file=str(train_file),
            eval_file=str(eval_file),
            out_dir=str(self.trained_dir),
            storage_path=str(self._storage),
            run_name=self.NAME,
            milestones=self.milestones,
            settings=self.settings,
            seed=self.settings.seed,
            keep_best=self.KEEPS_BEST,
            checkpoint_minutes=self.checkpoint_minutes,
        )

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    @property
    def _storage(self) -> Path:
        return self.folder / "train"

    # ---- what is on disk -------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return everything that the result depends on, as plain values."""
        names = [f.name for f in fields(self) if f.name not in ("out", "checkpoint_minutes")]
        record = {name: getattr(self, name) for name in names}
        return {**record, "settings": self.settings.model_dump()}

    @property
    def mark_file(self) -> Path:
        return self.folder / f"{self.NAME}.json"

    @property
    def mark(self) -> Mapping[str, Any]:
        """Settings and facts of an earlier start, and whether it has `finished`."""
        return read_if_there(self.mark_file)

    def note(self, **facts: Any) -> None:
        """Write the mark, adding these facts to those that it has."""
        write_json(self.mark_file, {**self.to_dict(), **self.mark, **facts})

    def check_folders(self, overwrite: bool) -> None:
        """Raise ConfigError or OutputError unless `out` may be written.

        It may hold this very training.
        """
        mark = self.mark
        reads = [self.source, *self.models.values()]
        if not mark:
            check_folder(self.out, overwrite=overwrite, reads=reads)
            check_folder(self.folder, reads=reads)
            return
        # Fields that came later, which a mark may lack
        later = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        before = {**later, **mark, **self._sources(mark)}
        before["settings"] = _compared(TrainSettings.model_validate(mark["settings"]))
        now = json.loads(json.dumps(self.to_dict())) | self._sources(self.models)
        now["settings"] = _compared(self.settings)
        if changed := [name for name in now if before.get(name) != now[name]]:
            raise ConfigError(
                f"out: {self.folder} holds a training with another {', '.join(changed)}; give "
                "another --out, or remove that folder to start over"
            )
        if "inputs" in mark:
            inputs = self._inputs()
            # Texts of an unfinished training are compared when they are tokenised: a file may be
            # newer, and its text the same
            names = inputs if mark.get("finished") else self.models
            if changed := [
                name
                for name in names
                if name in inputs and mark["inputs"].get(name) != inputs[name]
            ]:
                raise self._of_other_inputs(changed)
        if mark.get("finished") and not self.out.is_dir():
            raise ConfigError(
                f"out: {self.out} was trained and is gone; remove {self.folder} to train it again"
            )
        if not self.finished:
            check_folder(self.out, overwrite=True, reads=reads)

    def _sources(self, models: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the models by what was copied: a dry run has other plain copies of them."""
        return {name: source_name(models[name]) for name in self.models if models.get(name)}

    def _inputs(self) -> dict[str, str]:
        """Return digests of the weights in folders, and of the sources of both texts.

        The plain copies of a dry run have no weights.
        """
        folders = {
            name: path
            for name, path in self.models.items()
            if Path(path).is_dir() and source_note(path).get("weights", True)
        }
        digests = {
            name: checkpoint.weights_digest(path, self._data) for name, path in folders.items()
        }
        train, held_out = self.cuts
        texts = {"train_data": train.corpus, "eval_data": held_out.corpus}
        return digests | {name: corpus.fingerprint for name, corpus in texts.items()}

    def _of_other_inputs(self, names: Sequence[str]) -> ConfigError:
        return ConfigError(
            f"out: {self.folder} holds a training whose {', '.join(names)} has changed since then; "
            "give another --out, or remove that folder to start over"
        )

    @property
    def finished(self) -> bool:
        """Whether an earlier start has finished it, with its weights unchanged since then."""
        mark = self.mark
        digest = mark.get("weights_digest")
        return bool(mark.get("finished")) and digest == checkpoint.weights_digest(self.out)

    def results(self) -> dict[str, Any]:
        """Return the keys of `TrainingRecord`, and all that the training depends on."""
        reports = CheckpointStore(str(self._storage), self.NAME).read()[1]
        milestones = [
            {name: report[name] for name in Milestone.__annotations__} for report in reports
        ]
        mark = self.mark
        return {
            **self.to_dict(),
            "out": str(self.out),
            "seed": self.settings.seed,
            "learning_rate": self.settings.learning_rate,
            "parameters": mark["parameters"],
            "weights_digest": mark["weights_digest"],
            **milestones[-1],
            "milestones": milestones,
        }


def _compared(settings: TrainSettings) -> Mapping[str, Any]:
    """Return the settings that a training is continued with: on any number of CPUs."""
    return {key: value for key, value in settings.identity().items() if key != "cpus_per_worker"}


def steps_between(steps: int, eval_every: int | None) -> int:
    """Return the steps between milestones, by default a tenth.

    Raises ConfigError for what is not at least 1.
    """
    eval_every = max(1, steps // 10) if eval_every is None else eval_every
    for name, value in (("steps", steps), ("eval_every", eval_every)):
        if value < 1:
            raise ConfigError(f"{name}: got {value}; it must be at least 1")
    return eval_every


def result_folder(out: str | Path) -> Path:
    """Return the absolute path.

    Raises ConfigError for an address, where no checkpoint can be written.
    """
    if is_remote(str(out)):
        raise ConfigError(
            f"out: got {str(out)!r}; it must be a folder of this machine or one that it mounts"
        )
    return storage_path(str(out))


def absolute(model: str | Path) -> str:
    """Return a folder by its absolute path, a hub name as it is."""
    return str(Path(model).absolute()) if Path(model).is_dir() else str(model)
