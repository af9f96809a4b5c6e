"""What `headfold evaluate` measures after loss and cache: tasks, generated text, long contexts.

Each is checked, and its data made, before any model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from torch import Tensor

from attention.base.progress import stage
from orchestrator.evaluation.generations import (
    Generation,
    compare_generations,
    encode_prompts,
    greedy,
)
from orchestrator.evaluation.long_context import (
    Needles,
    PositionLoss,
    Recall,
    context_lengths,
    loss_by_position,
)
from orchestrator.evaluation.tasks import HarnessTasks, Scores


class ModelExtras(TypedDict):
    """What one model gives."""

    tasks: NotRequired[Scores]
    continuations: NotRequired[list[list[int]]]
    """Token ids after each prompt."""
    loss_by_position: NotRequired[list[PositionLoss]]
    recall: NotRequired[dict[str, list[Recall]]]
    """By context length."""


class LongContextRecord(TypedDict):
    """Losses and recalls in long contexts, each by model."""

    loss_by_position: dict[str, list[PositionLoss]]
    recall: dict[str, dict[str, list[Recall]]]


class ExtrasRecord(TypedDict):
    """Fields of the JSON of `headfold evaluate`, by model: checkpoint, original, baseline."""

    tasks: NotRequired[dict[str, Scores]]
    """By model."""
    generations: NotRequired[list[Generation]]
    long_context: NotRequired[LongContextRecord]


@dataclass(frozen=True)
class Extras:
    """What is requested.

    Attributes:
        tasks: Of lm-evaluation-harness, as `task_files.task_specs` takes them.
        prompts: Prompts themselves.
        context_lengths: As `long_context.context_lengths` takes them.
    """

    tasks: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    context_lengths: str | None = None

    def prepare(
        self,
        tokenizer: Any,
        max_positions: int,
        held_out: Callable[[int], Tensor],
        seed: int,
    ) -> PreparedExtras:
        """Check everything and load all data.

        Args:
            tokenizer: Of the models.
            max_positions: Of the models.
            held_out: Called with a length, gives held-out texts `[N, length]`.
            seed: Of the hidden lines.

        Raises:
            ConfigError: For what a user can mend. Likewise DataError of texts.
        """
        prompts = list(self.prompts)
        encoded = encode_prompts(prompts, tokenizer, max_positions)
        lengths = []
        if self.context_lengths is not None:
            lengths = context_lengths(self.context_lengths, max_positions)
        texts = {length: held_out(length) for length in lengths}
        return PreparedExtras(
            tokenizer=tokenizer,
            prompts=prompts,
            encoded=encoded,
            longest=texts[lengths[-1]] if lengths else None,
            needles={length: Needles.hide(texts[length], tokenizer, seed) for length in texts},
            tasks=HarnessTasks(self.tasks, tokenizer, lengths, seed) if self.tasks else None,
        )


@dataclass(frozen=True)
class PreparedExtras:
    """What is measured of each model, with its data.

    Attributes:
        tokenizer: Of the models.
        tasks: Tasks of the harness, if any.
        prompts: Prompts, and as token ids `encoded`.
        longest: Held-out text `[N, L]` of the longest context length.
        needles: Hidden lines by context length.
    """

    tokenizer: Any
    tasks: HarnessTasks | None
    prompts: list[str]
    encoded: list[list[int]]
    longest: Tensor | None
    needles: dict[int, Needles]

    def measure(self, model: Any) -> ModelExtras:
        """Measure one model."""
        measured: ModelExtras = {}
        if self.tasks is not None:
            measured["tasks"] = self.tasks.scores(model, self.tokenizer)
        if self.prompts:
            end = self.tokenizer.eos_token_id
            continuations = measured["continuations"] = []
            with stage("continuing prompts", len(self.encoded), "prompts") as progress:
                for prompt in self.encoded:
                    continuations.append(greedy(model, prompt, end))
                    progress.step()
        if self.longest is not None:
            measured["loss_by_position"] = loss_by_position(model, self.longest)
            tokens = sum(needles.ids.numel() for needles in self.needles.values())
            with stage("recall in long contexts", tokens, "tokens") as progress:
                measured["recall"] = {
                    str(length): needles.recall(model, progress.step)
                    for length, needles in self.needles.items()
                }
        return measured

    def record(self, models: Mapping[str, Any]) -> ExtrasRecord:
        """Return what all models gave, by field and then by model.

        Args:
            models: `ModelExtras` by model.
        """
        fields: ExtrasRecord = {}
        if self.tasks is not None:
            fields["tasks"] = {name: extras["tasks"] for name, extras in models.items()}
        if self.prompts:
            texts = {name: extras["continuations"] for name, extras in models.items()}
            fields["generations"] = compare_generations(self.prompts, texts, self.tokenizer)
        if self.longest is not None:
            fields["long_context"] = {
                "loss_by_position": {
                    name: extras["loss_by_position"] for name, extras in models.items()
                },
                "recall": {name: extras["recall"] for name, extras in models.items()},
            }
        return fields


NO_EXTRAS = Extras()
