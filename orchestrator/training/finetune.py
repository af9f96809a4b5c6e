"""`headfold finetune`: train on a checkpoint, converted or not, on the user's text; its best measured step is kept.

OUT.training also holds the weights of the best step until OUT is written (`orchestrator.training.task`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention.checkpoint import Checkpoint
from attention.io import checkpoint, piecewise
from attention.io.precision import DTYPES
from attention.io.safetensors_files import open_safetensors, stored_tensors
from attention.io.sources import check_source
from orchestrator import checkpoints
from orchestrator.cluster.ray_tasks import on_cluster
from orchestrator.config.schema import ConfigError, FineTuneSection, check_training, parse_section
from orchestrator.training.task import (
    MEASURED,
    Progress,
    TrainingTask,
    absolute,
    result_folder,
    spans,
    train_record,
)
from trainers.evaluation import evaluate
from trainers.jobs.worker import TrainJob
from trainers.settings import TrainSettings
from trainers.text.data import Texts, read_sequences

TRAIN_TOKENS = 100_000_000  # of text at most, unless asked for
DISTILLATION = "kl"


@dataclass(frozen=True, kw_only=True)
class FineTuning(TrainingTask):
    """A training of a checkpoint, checked. `original`: what is distilled from; `dtype`: of the trained checkpoint."""

    RUN, MARK, VERB = "finetune", "finetune.json", "finetune"

    model: str
    original: str | None
    dtype: str

    @property
    def source(self) -> str:
        return self.model

    @property
    def title(self) -> str:
        what = {"full": "all weights", "lora": "adapters", "kv": "keys and values"}[self.settings.tuning]
        return f"{what} of {Path(self.model).name}"

    @property
    def kv_bytes_per_token(self) -> int:
        return Checkpoint.open(self.model).plan.kv_bytes_per_token(DTYPES[self.dtype])

    def make(self, eval_file: Path) -> dict[str, Any]:
        """The loss before; the files of a hub model come here too, before any worker asks for them."""
        folder = str(Checkpoint.open(self.model).folder)
        teacher = None if self.original is None else str(Checkpoint.open(self.original).folder)
        options = {"num_cpus": self.settings.cpus_per_worker, "num_gpus": self.settings.gpus_per_worker}
        before = on_cluster(options, "loss of the model as it is", _measure, folder, str(eval_file), self.settings)
        return {"folder": folder, "teacher": teacher} | before

    def job(self, **common: Any) -> TrainJob:
        known, trained = self.known, str(self.folder / "trained")
        return TrainJob(
            model_dir=known["folder"], teacher_dir=known["teacher"], out_dir=trained, keep_best=True, **common
        )

    def ship(self, last: dict[str, Any]) -> dict[str, Any]:
        """Write the best measured step to `out`; which one it is, and the digest of its weights."""
        best, dtype = Path(last["best_dir"]), DTYPES[self.dtype]
        piecewise.save_as(best, _tensors(best, dtype), self.out, checkpoint.carried(self.known["folder"]))
        found = {"best_step": last["best_step"], "loss": last["best_loss"], "kl": last["best_kl"]}
        return found | {"weights_digest": checkpoint.weights_digest(self.out)}


def _measure(folder: str, eval_file: str, settings: TrainSettings) -> dict[str, Any]:
    """Held-out loss of a checkpoint in the dtype that is trained in, and its size."""
    model = checkpoint.load(folder, DTYPES[settings.dtype])
    model.to(settings.shape.device)  # pyright: ignore[reportArgumentType]
    measured = evaluate(model, read_sequences(eval_file)[:])
    return {"loss_before": measured.loss, "parameters": checkpoints.parameters(model)}


def _tensors(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint that we have written, those of floating point rounded to `dtype`."""
    for name, stored in stored_tensors(folder).items():
        with open_safetensors(folder / stored.file) as file:
            tensor = file.get_tensor(name)
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def check(
    model: str | Path,
    out: str | Path,
    *,
    steps: int,
    learning_rate: float,
    tuning: str = "full",
    original: str | Path | None = None,
    overrides: Sequence[str] = (),
    train_data: str | None = None,
    eval_data: str | None = None,
    text_field: str = "text",
    train_tokens: int | None = None,
    eval_tokens: int | None = None,
    sequence_length: int | None = None,
    eval_every: int | None = None,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
) -> FineTuning:
    """Everything that can be wrong, before anything is read or started but configs and headers.

    Raises ConfigError, and DataError for a source of text that there is not.
    """
    check_source(model, "model")
    if original is not None:
        check_source(original, "original")
    settings = _settings(train_record({}, overrides, learning_rate, seed, device), tuning, original is not None)
    check_training(settings)
    opened = checkpoints.open_checkpoint(model, sequence_length=sequence_length)
    geometry, tokenizer = opened.geometry, checkpoints.load_tokenizer(opened)
    texts = Texts(train_data, eval_data, text_field, seed)
    if opened.plan.head_shares and tuning == "kv":
        raise ConfigError("tuning: layers of this model share heads, and so their weights; use --tuning full")
    if original is not None:
        teacher = checkpoints.open_checkpoint(original, "original", sequence_length=sequence_length)
        other = teacher.geometry
        if other.vocab_size != geometry.vocab_size:
            raise ConfigError(
                f"original: its vocabulary has {other.vocab_size} tokens, that of {str(model)!r} has "
                f"{geometry.vocab_size}; give the model that this one was converted from"
            )
        checkpoints.check_same_tokens(tokenizer, teacher, "original", "model")
    if sequence_length is None:
        measured = {"eval_tokens": eval_tokens, "calibrate": False}
        sequence_length = texts.load(tokenizer, geometry.max_positions, **measured).held_out.shape[1]
    task = FineTuning(
        model=absolute(model),
        original=None if original is None else absolute(original),
        dtype=checkpoints.written_dtype(opened, dtype),
        settings=settings,
        steps=steps,
        eval_every=spans(steps, eval_every),
        train_data=texts.source,
        eval_data=texts.eval_source,
        text_field=text_field,
        train_tokens=min(steps * settings.batch_size * sequence_length, TRAIN_TOKENS)
        if train_tokens is None
        else train_tokens,
        eval_tokens=eval_tokens,
        sequence_length=sequence_length,
        out=result_folder(out),
    )
    for cut in task.cuts:
        cut.check()
    return task


def _settings(record: dict[str, Any], tuning: str, distilled: bool) -> TrainSettings:
    """With --tuning and --original in them. Raises ConfigError where `--set` says something else."""
    train = record["train"]
    if isinstance(train, dict):
        if "tuning" in train:
            raise ConfigError("train.tuning: it has an option of its own; give it as --tuning")
        if not distilled and train.get("distillation", "none") != "none":
            raise ConfigError("train.distillation: it needs the model to learn from; give it as --original")
        learns = {"distillation": DISTILLATION} if distilled else {}
        record["train"] = learns | train | {"tuning": tuning}
    return parse_section(FineTuneSection, record, "this training").train


def finetune_checkpoint(
    model: str | Path, out: str | Path, *, progress: Progress = print, overwrite: bool = False, **settings: Any
) -> dict[str, Any]:
    """Train on the checkpoint `model` and save its best measured step in `out`, in the dtype of `model`.

    `settings` are those of `check`. `tuning`: "full" trains all weights, "lora" adapters that are merged at the end,
    "kv" the projections of keys and values alone; `original`: a model to distil from, by KL unless
    `train.distillation` says otherwise. `out` must be free, hold this very training, or with `overwrite` a checkpoint
    that we wrote. `progress` is told each milestone in words. Returns one record: losses in nats a token before, of the
    best step and at each milestone; tokens, tokens a second of training, seconds. What is shipped is the best of the
    measured steps; `better` says whether it is better than the model was before.
    """
    task = check(model, out, **settings)
    task.check_folders(overwrite)
    known = task.carry_out(progress, task.ship)
    last, losses = task.reports()[-1], {name: known[name] for name in ("loss_before", "best_step", "loss", "kl")}
    return {
        **task.to_dict(),
        "out": str(task.out),
        "seed": task.settings.seed,
        "learning_rate": task.settings.learning_rate,
        "parameters": known["parameters"],
        "weights_digest": known["weights_digest"],
        **{name: last[name] for name in MEASURED},
        **losses,
        "better": losses["loss"] < losses["loss_before"],
        "milestones": task.measured(),
    }
