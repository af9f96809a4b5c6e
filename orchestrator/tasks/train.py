"""`headfold train`: a model of a known architecture from random weights.

It is a plain Transformer or a DCFormer. OUT.training has the untrained model too
(`orchestrator.training.request`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired

import torch

from attention.base.messages import did_you_mean
from attention.checkpoint import Checkpoint
from attention.conversion.convert import build
from attention.io import checkpoint
from attention.io.dtype_names import full_name
from attention.modeling.composition import reset
from attention.modeling.model_classes import headfold_config
from attention.plan import AttentionPlan, Composition
from orchestrator import checkpoints
from orchestrator.config.options import TrainOptions
from orchestrator.config.schema import (
    ConfigError,
    ScratchRecipe,
    TrainSection,
    check_training,
    parse_section,
)
from orchestrator.tasks.training import TrainingTask, train_section
from orchestrator.training.request import (
    TrainingRecord,
    TrainingRequest,
    absolute,
    result_folder,
    steps_between,
)
from orchestrator.training.run import TrainingReport
from search_spaces.composition.dcmha import composition_of
from trainers.packing import check_packing
from trainers.text import synthetic_corpus
from trainers.text.data import Texts
from trainers.text.tokenising import beginning

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TRAIN_TOKENS = (
    4_000_000  # of text at most, unless the options say more; a longer training sees it again
)


class TrainRecord(TrainingRecord):
    """The JSON of `headfold train`."""

    architecture: str
    recipe: ScratchRecipe
    plan: Mapping[str, Any]
    plan_digest: str
    answers: NotRequired[Mapping[str, Any]]
    """Measured on `synthetic:NAME`: accuracy and perplexity of the answers alone, over `count`
    examples and by task (Xiao 2024, Table 5)."""


@dataclass(frozen=True, kw_only=True)
class ScratchRequest(TrainingRequest):
    """A training from scratch, checked."""

    NAME, VERB = "scratch", "train"

    architecture: str
    recipe: ScratchRecipe
    plan: AttentionPlan

    @property
    def source(self) -> str:
        return self.architecture

    @property
    def title(self) -> str:
        return self.recipe

    @property
    def kv_bytes_per_token(self) -> int:
        return self.plan.kv_bytes_per_token(full_name(self.settings.dtype))

    @property
    def start_dir(self) -> str:
        return str(self.folder / "untrained")

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "plan": self.plan.to_dict()}

    def prepare(self, eval_file: Path) -> Mapping[str, Any]:
        model = initial_model(self.architecture, self.plan, self.settings.seed)
        checkpoint.save(model, self.start_dir, self.architecture)
        return {"parameters": checkpoints.parameters(model)}

    def ship(self, last: TrainingReport) -> Mapping[str, Any]:
        return {"weights_digest": last["weights_digest"]}


class Train(TrainingTask[TrainOptions, TrainRecord]):
    """A training from random weights, with the architecture and the tokenizer of a checkpoint.

    Recipe "dcformer" composes heads dynamically (Xiao 2024) from the paper's initialisation. With
    one seed both recipes start from the same weights, composition apart, and see the same text.
    """

    @cached_property
    def request(self) -> ScratchRequest:
        options = self.options
        checkpoints.check_named(options.architecture, "architecture")
        section = self._section()
        check_training(section.train)
        opened = checkpoints.open_checkpoint(
            checkpoints.open_model(options.architecture, "architecture", weights=False),
            "architecture",
            sequence_length=options.sequence_length,
            weights=False,
        )
        tokenizer = checkpoints.load_tokenizer(opened)
        eval_every = steps_between(options.steps, options.eval_every)
        composed = composition_of(section.composition) if section.recipe == "dcformer" else None
        plan = replace(opened.plan, composition=composed)
        headfold_config(opened.config, plan)  # whether the plan fits
        tokens = min(
            options.steps * section.train.batch_size * options.sequence_length, _TRAIN_TOKENS
        )
        texts = Texts(options.train_data, options.eval_data, options.text_field, options.seed)
        request = ScratchRequest(
            architecture=absolute(opened.path),
            recipe=section.recipe,
            plan=plan,
            settings=section.train,
            steps=options.steps,
            eval_every=eval_every,
            train_data=texts.source,
            eval_data=texts.eval_source,
            text_field=options.text_field,
            train_tokens=tokens if options.train_tokens is None else options.train_tokens,
            eval_tokens=options.eval_tokens,
            sequence_length=options.sequence_length,
            out=result_folder(options.out),
            checkpoint_minutes=options.checkpoint_minutes,
        )
        for cut in request.cuts:
            cut.check()
        check_packing(request.settings, request.cuts[0], tokenizer, opened.config.model_type)
        request.check_folders(options.overwrite)
        return request

    def _section(self) -> TrainSection:
        options = self.options
        record = train_section({"recipe": options.recipe}, options, options.learning_rate)
        section = parse_section(TrainSection, record, "this training")
        defaults = {"windowed": False} | {f.name: f.default for f in fields(Composition)}
        for name, value in section.composition.items():
            if name not in defaults:
                there_are = ", ".join(defaults)
                raise ConfigError(
                    f"composition.{name}: unknown setting{did_you_mean(name, defaults)}; there are "
                    f"{there_are}"
                )
            if type(value) is not type(defaults[name]):
                kind = "true or false" if isinstance(defaults[name], bool) else "a whole number"
                raise ConfigError(f"composition.{name}: got {value!r}; it must be {kind}")
        if section.composition and section.recipe != "dcformer":
            raise ConfigError(
                f"composition: recipe {section.recipe} composes no heads; use --recipe dcformer"
            )
        if section.train.distillation != "none":
            raise ConfigError(
                "train.distillation: a training from scratch has no original model to learn from; "
                "use none"
            )
        if section.train.tuning != "full":
            raise ConfigError("train.tuning: random weights must all be trained; use full")
        return section

    def run(self) -> TrainRecord:
        """Train and save.

        An interrupted training is continued; a finished one returns its results.

        Raises:
            ConfigError: For what a user can mend. Likewise PlanError, DataError, OutputError.
        """
        self.train()
        request = self.request
        return TrainRecord(
            **request.results(), **_answers(request), plan_digest=request.plan.digest
        )

    def show(self, record: TrainRecord) -> None:
        print(f"held-out loss {record['loss']:.3f} nats per token after {record['tokens']} tokens")
        if answers := record.get("answers"):
            right = f"{answers['accuracy']:.1%} right, perplexity {answers['perplexity']:.2f}"
            print(f"answers to {answers['count']} examples: {right}")
        print(f"checkpoint: {record['out']}")


def _answers(request: ScratchRequest) -> dict[str, Any]:
    """Return the results of the trained model on the held-out synthetic tasks.

    Empty unless it was measured on them.
    """
    if not request.eval_data.startswith(synthetic_corpus.SYNTHETIC_PREFIX):
        return {}
    model = checkpoint.load(request.out)
    name = request.eval_data.removeprefix(synthetic_corpus.SYNTHETIC_PREFIX)
    tokenizer = checkpoints.load_tokenizer(request.architecture)
    return {
        "answers": asdict(
            synthetic_corpus.score_held_out(model, tokenizer, name, first=beginning(tokenizer))
        )
    }


def initial_model(architecture: str | Path, plan: AttentionPlan, seed: int) -> PreTrainedModel:
    """Return a model of the plan with the architecture's own initialisation.

    Composition has that of Xiao 2024, sec. 4. The weights follow from `seed` alone; torch's global
    generator, which transformers initialises with, is not changed.
    """
    random: Any = torch.random
    with random.fork_rng(devices=[]):
        random.manual_seed(seed)
        model = build(Checkpoint.open(architecture).config, plan)
    reset(model, identity=False, generator=torch.Generator().manual_seed(seed))
    return model
