"""`headfold finetune`: train a checkpoint on the user's text, and keep its best measured step.

OUT.training also has the weights of the best step until OUT is written
(`orchestrator.training.request`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from attention.base.progress import stage
from attention.checkpoint import Checkpoint
from attention.families import family_of
from attention.io import checkpoint, piecewise
from attention.io.precision import DTYPES, in_float32
from attention.io.safetensors_files import open_safetensors, stored_tensors
from orchestrator import checkpoints
from orchestrator.cluster.ray_tasks import on_cluster
from orchestrator.config.options import FinetuneOptions
from orchestrator.config.parsing import read_override
from orchestrator.config.schema import ConfigError, FineTuneSection, check_training, parse_section
from orchestrator.tasks.training import TrainingTask, train_section
from orchestrator.training.request import (
    TrainingRecord,
    TrainingRequest,
    absolute,
    result_folder,
    steps_between,
)
from orchestrator.training.run import TrainingReport
from trainers.evaluation import evaluate
from trainers.jobs.share import evaluate_together, frozen_model
from trainers.jobs.worker import call_on_workers
from trainers.packing import check_packing
from trainers.settings import TrainSettings
from trainers.text.data import Texts, read_sequences

_TRAIN_TOKENS = 100_000_000  # of text at most, unless the options say more
_OBJECTIVE = {"distillation": "kl", "distillation_weight": 1.0}
"""Objective with an original model, unless `train.distillation` names another."""


class FinetuneRecord(TrainingRecord):
    """The JSON of `headfold finetune`. `loss` is that of the best step, in nats per token."""

    model: str
    original: str | None
    dtype: str
    loss_before: float
    best_step: int
    kl: float | None
    better: bool
    """Whether the best step is better than the initial model."""


@dataclass(frozen=True, kw_only=True)
class FinetuneRequest(TrainingRequest):
    """A training of a checkpoint, checked.

    Attributes:
        original: The model to distil from.
        dtype: Dtype of the trained checkpoint.
    """

    NAME, VERB, KEEPS_BEST = "finetune", "finetune", True

    model: str
    original: str | None
    dtype: str

    @property
    def source(self) -> str:
        return self.model

    @property
    def models(self) -> Mapping[str, str]:
        named = {"model": self.model, "original": self.original}
        return {name: path for name, path in named.items() if path is not None}

    @property
    def title(self) -> str:
        parts = {"full": "all weights", "lora": "adapters", "kv": "keys and values"}[
            self.settings.tuning
        ]
        return f"{parts} of {Path(self.model).name}"

    @property
    def kv_bytes_per_token(self) -> int:
        return Checkpoint.open(self.model).plan.kv_bytes_per_token(DTYPES[self.dtype])

    @property
    def start_dir(self) -> str:
        return self.mark["folder"]

    @property
    def teacher_dir(self) -> str | None:
        return self.mark["teacher"]

    @property
    def trained_dir(self) -> Path:
        return self.folder / "trained"

    def prepare(self, eval_file: Path) -> Mapping[str, Any]:
        """Measure the loss before.

        The files of a hub model are downloaded here too, before any worker needs them.
        """
        folder = str(Checkpoint.open(self.model).folder)
        teacher = None if self.original is None else str(Checkpoint.open(self.original).folder)
        settings, label = self.settings, "loss of the model as it is"
        measure = partial(_measure, folder, str(eval_file), settings)
        if settings.zero_stage == 3:  # one worker may have no room for the whole model
            with stage(label):
                before = call_on_workers(measure, settings.shape, "before", str(self._storage))
        else:
            resources = {
                "num_cpus": settings.cpus_per_worker,
                "num_gpus": settings.gpus_per_worker,
            }
            before = on_cluster(resources, label, measure)
        return {"folder": folder, "teacher": teacher, **before}

    def ship(self, last: TrainingReport) -> Mapping[str, Any]:
        """Write the best measured step to `out`.

        Returns:
            The step, and the digest of its weights.
        """
        best, dtype = Path(last["best_dir"]), DTYPES[self.dtype]
        piecewise.save_as(best, _tensors(best, dtype), self.out, checkpoint.carried(self.start_dir))
        return {
            "best_step": last["best_step"],
            "loss": last["best_loss"],
            "kl": last["best_kl"],
            "weights_digest": checkpoint.weights_digest(self.out),
        }


class _Start(TypedDict):
    loss_before: float
    parameters: int


def _measure(folder: str, eval_file: str, settings: TrainSettings) -> _Start:
    """Held-out loss of a checkpoint in the dtype that is trained in, and its size.

    With ZeRO 3 all workers measure it together.
    """
    sequences = read_sequences(eval_file)[:]
    with frozen_model(folder, settings, torch.device(settings.shape.device)) as model:
        if settings.zero_stage == 3:
            measured = evaluate_together(model, sequences, settings)
        else:
            measured = evaluate(model, sequences)
        return {"loss_before": measured.loss, "parameters": checkpoints.parameters(model)}


def _tensors(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a checkpoint, those of floating point rounded to `dtype`.

    Not those that choose experts, which are in float32 in any checkpoint.
    """
    stays = in_float32(family_of(checkpoint.load_config(folder)).model_class)
    for name, stored in stored_tensors(folder).items():
        with open_safetensors(folder / stored.file) as file:
            tensor = file.get_tensor(name)
        rounds = tensor.is_floating_point() and not stays(name)
        yield name, tensor.to(dtype) if rounds else tensor


class Finetune(TrainingTask[FinetuneOptions, FinetuneRecord]):
    """A training of a checkpoint, whose best measured step is saved, in its dtype.

    `tuning`: "full" trains all weights, "lora" adapters that are merged at the end, "kv" the
    projections of keys and values alone. With `original` the loss is KL(original ‖ model), unless
    `train.distillation` says otherwise.
    """

    @cached_property
    def request(self) -> FinetuneRequest:
        options = self.options
        checkpoints.check_named(options.model, "model")
        if options.original is not None:
            checkpoints.check_named(options.original, "original")
        settings = self._settings()
        check_training(settings)
        model = self._open(options.model, "model")
        geometry, tokenizer = model.geometry, checkpoints.load_tokenizer(model)
        if model.plan.head_shares and options.tuning == "kv":
            raise ConfigError(
                "tuning: layers of this model share heads, and so their weights; use --tuning full"
            )
        original = None
        if options.original is not None:
            original = self._open(options.original, "original")
            if original.geometry.vocab_size != geometry.vocab_size:
                raise ConfigError(
                    f"original: its vocabulary has {original.geometry.vocab_size} tokens, that of "
                    f"{model.path!r} has {geometry.vocab_size}; give the model that this one was "
                    "converted from"
                )
            checkpoints.check_same_tokens(tokenizer, original, "original", "model")
        texts = Texts(options.train_data, options.eval_data, options.text_field, options.seed)
        length = options.sequence_length
        if length is None:
            loaded = texts.load(
                tokenizer, geometry.max_positions, eval_tokens=options.eval_tokens, calibrate=False
            )
            length = loaded.held_out.shape[1]
        tokens = min(options.steps * settings.batch_size * length, _TRAIN_TOKENS)
        request = FinetuneRequest(
            model=absolute(model.path),
            original=None if original is None else absolute(original.path),
            dtype=checkpoints.written_dtype(model, options.dtype),
            settings=settings,
            steps=options.steps,
            eval_every=steps_between(options.steps, options.eval_every),
            train_data=texts.source,
            eval_data=texts.eval_source,
            text_field=options.text_field,
            train_tokens=tokens if options.train_tokens is None else options.train_tokens,
            eval_tokens=options.eval_tokens,
            sequence_length=length,
            out=result_folder(options.out),
            checkpoint_minutes=options.checkpoint_minutes,
        )
        if request.mark and not {"distillation", "distillation_weight"} & self._named:
            # A training that started with another default of the weight continues with it
            weight = request.mark["settings"]["distillation_weight"]
            begun = settings.model_copy(update={"distillation_weight": weight})
            request = replace(request, settings=begun)
        for cut in request.cuts:
            cut.check()
        check_packing(request.settings, request.cuts[0], tokenizer, model.config.model_type)
        request.check_folders(options.overwrite)
        return request

    @property
    def _named(self) -> set[str]:
        """The settings of the training that `--set` names."""
        keys = {read_override(override)[0] for override in self.options.overrides or ()}
        return {key.removeprefix("train.") for key in keys}

    def _open(self, source: checkpoints.CheckpointSource, key: str) -> Checkpoint:
        weights, dequantize = not self.rehearsal, self.options.dequantize
        opened = checkpoints.open_model(source, key, dequantize=dequantize, weights=weights)
        return checkpoints.open_checkpoint(
            opened, key, sequence_length=self.options.sequence_length
        )

    def _settings(self) -> TrainSettings:
        """Return the settings with --tuning and --original.

        Raises ConfigError if `--set` contradicts them.
        """
        options = self.options
        record = train_section({}, options, options.peak_rate)
        train: Any = record["train"]
        distilled = options.original is not None
        if isinstance(train, dict):
            if "tuning" in train:
                raise ConfigError("train.tuning: it has its own option; give it as --tuning")
            if (
                not distilled
                and cast(Mapping[str, object], train).get("distillation", "none") != "none"
            ):
                raise ConfigError(
                    "train.distillation: it needs the original model; give it as --original"
                )
            named = not distilled or "distillation" in train
            record["train"] = ({} if named else _OBJECTIVE) | train | {"tuning": options.tuning}
        return parse_section(FineTuneSection, record, "this training").train

    def run(self) -> FinetuneRecord:
        """Train and save.

        An interrupted training is continued; a finished one returns its results.

        Raises:
            ConfigError: For what a user can mend. Likewise DataError, OutputError.
        """
        self.train()
        mark = self.request.mark
        losses = {name: mark[name] for name in ("loss_before", "best_step", "loss", "kl")}
        values = self.request.results() | losses
        return FinetuneRecord(**values, better=losses["loss"] < losses["loss_before"])

    def show(self, record: FinetuneRecord) -> None:
        print(
            f"held-out loss in nats per token: {record['loss_before']:.3f} before, "
            f"{record['loss']:.3f} at step {record['best_step']}, which is kept"
        )
        if not record["better"]:
            print(
                "warning: no measured step is better than the model was; try a lower "
                "--learning-rate or more text"
            )
        print(f"checkpoint: {record['out']}")
