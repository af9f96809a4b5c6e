"""What `headfold evaluate` measures beside loss and cache, where it is asked for: each is checked, and its data made,
before any model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from orchestrator.evaluation.generations import encode_prompts, greedy, side_by_side
from orchestrator.evaluation.long_context import Needles, context_lengths, loss_by_position
from orchestrator.evaluation.tasks import HarnessTasks


@dataclass(frozen=True)
class Extras:
    """What is asked for: `tasks` as in `task_files.task_specs`, `prompts` themselves,
    `context_lengths` as in `long_context.context_lengths`."""

    tasks: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    context_lengths: str | None = None

    def prepare(self, tokenizer: Any, most: int, held_out: Callable[[int], Tensor], seed: int) -> PreparedExtras:
        """With all data, for models of `most` positions. `held_out(length)`: `[NUM_TEXTS, length]` held out. Raises
        ConfigError or DataError for what a user can mend."""
        prompts = list(self.prompts)
        encoded = encode_prompts(prompts, tokenizer, most)
        lengths = context_lengths(self.context_lengths, most) if self.context_lengths is not None else []
        texts = [held_out(length) for length in lengths]
        needles = {length: Needles.hide(text, tokenizer, seed) for length, text in zip(lengths, texts, strict=True)}
        tasks = HarnessTasks(self.tasks) if self.tasks else None
        return PreparedExtras(tokenizer, tasks, prompts, encoded, texts[-1] if texts else None, needles)


@dataclass(frozen=True)
class PreparedExtras:
    """`longest`: held-out text `[N, L]` of the longest context length; `needles`: of each length."""

    tokenizer: Any
    tasks: HarnessTasks | None
    prompts: list[str]
    encoded: list[list[int]]
    longest: Tensor | None
    needles: dict[int, Needles]

    def measure(self, model: Any) -> dict[str, Any]:
        """What one model gives."""
        made: dict[str, Any] = {}
        if self.tasks is not None:
            made["tasks"] = self.tasks.scores(model, self.tokenizer)
        if self.prompts:
            end = self.tokenizer.eos_token_id
            made["continuations"] = [greedy(model, prompt, end) for prompt in self.encoded]
        if self.longest is not None:
            made["loss_by_position"] = loss_by_position(model, self.longest)
            made["recall"] = {str(length): needles.recall(model) for length, needles in self.needles.items()}
        return made

    def record(self, models: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Fields of the verb's record, from what each model gave: by field, then by model (`checkpoint`, `original`,
        `baseline`)."""

        def of_all(field: str) -> dict[str, Any]:
            return {name: made[field] for name, made in models.items()}

        fields: dict[str, Any] = {}
        if self.tasks is not None:
            fields["tasks"] = of_all("tasks")
        if self.prompts:
            fields["generations"] = side_by_side(self.prompts, of_all("continuations"), self.tokenizer)
        if self.longest is not None:
            fields["long_context"] = {name: of_all(name) for name in ("loss_by_position", "recall")}
        return fields


NO_EXTRAS = Extras()
