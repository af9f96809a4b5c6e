"""`headfold train`: a model of a known architecture from random weights, a plain Transformer or a DCFormer.

OUT.training holds the untrained model too (`orchestrator.training.task`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attention.base.messages import near
from attention.checkpoint import Checkpoint
from attention.conversion.convert import build
from attention.io import checkpoint
from attention.io.sources import check_source
from attention.modeling.composition import reset
from attention.modeling.model_classes import headfold_config
from attention.plan import AttentionPlan, Composition
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError, ScratchRecipe, TrainSection, check_training, parse_section
from orchestrator.training.task import (
    MEASURED,
    Progress,
    TrainingTask,
    absolute,
    result_folder,
    spans,
    train_record,
)
from search_spaces.composition.dcmha import composition_of
from trainers.jobs.worker import TrainJob
from trainers.text import synthetic_corpus
from trainers.text.data import Texts
from trainers.text.tokenising import beginning

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAIN_TOKENS = 4_000_000  # of text at most, unless asked for; what is shorter than the training is seen again


@dataclass(frozen=True, kw_only=True)
class Scratch(TrainingTask):
    """A training from scratch, checked."""

    RUN, MARK, VERB = "scratch", "scratch.json", "train"

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
        return self.plan.kv_bytes_per_token(torch.float32)  # of which its weights are

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "plan": self.plan.to_dict()}

    def make(self, eval_file: Path) -> dict[str, Any]:
        model = untrained(self.architecture, self.plan, self.settings.seed)
        checkpoint.save(model, self.folder / "untrained", self.architecture)
        return {"parameters": checkpoints.parameters(model)}

    def job(self, **common: Any) -> TrainJob:
        return TrainJob(model_dir=str(self.folder / "untrained"), out_dir=str(self.out), **common)


def check(
    architecture: str | Path,
    out: str | Path,
    *,
    recipe: str = "transformer",
    steps: int,
    learning_rate: float,
    overrides: Sequence[str] = (),
    train_data: str | None = None,
    eval_data: str | None = None,
    text_field: str = "text",
    train_tokens: int | None = None,
    eval_tokens: int | None = None,
    sequence_length: int = 256,
    eval_every: int | None = None,
    seed: int = 0,
    device: str = "auto",
) -> Scratch:
    """Everything that can be wrong, before anything is read or started but configs.

    Raises ConfigError or PlanError, and DataError for a source of text that there is not.
    """
    check_source(architecture, "architecture")
    section = _section(train_record({"recipe": recipe}, overrides, learning_rate, seed, device))
    check_training(section.train)
    opened = checkpoints.open_checkpoint(architecture, "architecture", sequence_length=sequence_length, weights=False)
    checkpoints.load_tokenizer(opened)
    eval_every = spans(steps, eval_every)
    composed = composition_of(section.composition) if section.recipe == "dcformer" else None
    plan = replace(opened.plan, composition=composed)
    headfold_config(opened.config, plan)  # whether the plan fits
    wanted = min(steps * section.train.batch_size * sequence_length, TRAIN_TOKENS)
    texts = Texts(train_data, eval_data, text_field, seed)
    task = Scratch(
        architecture=absolute(architecture),
        recipe=section.recipe,
        plan=plan,
        settings=section.train,
        steps=steps,
        eval_every=eval_every,
        train_data=texts.source,
        eval_data=texts.eval_source,
        text_field=text_field,
        train_tokens=wanted if train_tokens is None else train_tokens,
        eval_tokens=eval_tokens,
        sequence_length=sequence_length,
        out=result_folder(out),
    )
    for cut in task.cuts:
        cut.check()
    return task


def _section(record: dict[str, Any]) -> TrainSection:
    section = parse_section(TrainSection, record, "this training")
    known = {"windowed": False} | {f.name: f.default for f in fields(Composition)}
    for name, value in section.composition.items():
        if name not in known:
            raise ConfigError(f"composition.{name}: unknown setting{near(name, known)}; there are {', '.join(known)}")
        if type(value) is not type(known[name]):
            kind = "true or false" if isinstance(known[name], bool) else "a whole number"
            raise ConfigError(f"composition.{name}: got {value!r}; it must be {kind}")
    if section.composition and section.recipe != "dcformer":
        raise ConfigError(f"composition: recipe {section.recipe} composes no heads; use --recipe dcformer")
    if section.train.distillation != "none":
        raise ConfigError("train.distillation: a training from scratch has no original model to learn from; use none")
    if section.train.tuning != "full":
        raise ConfigError("train.tuning: random weights have nothing worth keeping as it is; use full")
    return section


def train_from_scratch(
    architecture: str | Path,
    out: str | Path,
    *,
    progress: Progress = print,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train a model with the architecture and the tokenizer of `architecture` from random weights and save it in `out`.

    `settings` are those of `check`; `recipe` "dcformer" composes heads dynamically (Xiao 2024) from the paper's
    initialisation, "transformer" does not. With one seed both start from the same weights, composition apart, and see
    the same text. `out` must be free, hold this very training, or with `overwrite` a checkpoint that we wrote; its
    `out.training` is never replaced by another. `progress` is told each milestone in words. Returns one record: losses
    in nats per token at each milestone, tokens, tokens a second of training, parameters, seconds; measured on
    `synthetic:NAME` also `answers`: accuracy and perplexity of the answers alone, over `count` examples and by task
    (Xiao 2024, Table 5).
    """
    task = check(architecture, out, **settings)
    task.check_folders(overwrite)
    known = task.carry_out(progress, lambda metrics: {"weights_digest": metrics["weights_digest"]})
    last = task.reports()[-1]
    return {
        **task.to_dict(),
        **_answers(task),
        "out": str(task.out),
        "plan_digest": task.plan.digest,
        "seed": task.settings.seed,
        "learning_rate": task.settings.learning_rate,
        "parameters": known["parameters"],
        "weights_digest": known["weights_digest"],
        **{name: last[name] for name in MEASURED},
        "milestones": task.measured(),
    }


def _answers(task: Scratch) -> dict[str, Any]:
    """How the trained model answers the held-out synthetic tasks, if that is what it was measured on."""
    if not task.eval_data.startswith(synthetic_corpus.SYNTHETIC_PREFIX):
        return {}
    model = checkpoint.load(task.out)
    name = task.eval_data.removeprefix(synthetic_corpus.SYNTHETIC_PREFIX)
    tokenizer = checkpoints.load_tokenizer(task.architecture)
    return {"answers": asdict(synthetic_corpus.score_held_out(model, tokenizer, name, first=beginning(tokenizer)))}


def untrained(architecture: str | Path, plan: AttentionPlan, seed: int) -> PreTrainedModel:
    """A model of the plan with the architecture's own initialisation, composition with that of Xiao 2024, sec. 4.

    The weights follow from `seed` alone; torch's own generator, which transformers initialises with, is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(Checkpoint.open(architecture).config, plan)
    reset(model, identity=False, generator=torch.Generator().manual_seed(seed))
    return model
