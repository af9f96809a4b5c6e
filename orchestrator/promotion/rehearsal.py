"""`headfold promote --dry-run`: what a promotion would do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attention.base.text import compact
from attention.base.timing import duration
from orchestrator.promotion.promote import asked
from orchestrator.promotion.state import PromotionState
from orchestrator.resources.time import training_rate
from orchestrator.search.setup import open_models
from orchestrator.search.validation import rehearse_search


def rehearse_promotion(search: str | Path, *, trials: Iterable[str] = (), top: int | None = None) -> dict[str, str]:
    """What `promote_search` would do, in words by what they are about, after all that it checks without a cluster.
    Nothing is written. Raises as it does."""
    folder, config, chosen = asked(search, trials, top)
    config = open_models(config, weights=False)
    prepared = rehearse_search(config)
    state = PromotionState.load(folder.promotion)
    ratios = {trial.kv_ratio for trial in chosen}
    trainings = sum(trial.trial_id not in state.candidates for trial in chosen)
    trainings += sum(f"{ratio:g}" not in state.baselines for ratio in ratios)
    train, length, steps = config.promotion_train, config.data.sequence_length, config.promotion.steps
    tokens = trainings * steps * train.batch_size * length
    inputs = prepared.setup.inputs
    rate, source = training_rate(inputs.model, train, length, inputs.size, config.resources.tokens_per_second)
    hours = f", about {duration(tokens / rate / train.num_workers)} one after the other" if rate else ""
    return {
        "promote": ", ".join(f"{t.trial_id} ({t.name})" for t in chosen),
        "trainings": f"{trainings} not begun yet, the baseline's included, of {steps} steps: {compact(tokens)} tokens",
        "rate": f"{rate:.0f} tokens/s a worker, {source}{hours}" if rate else source,
    }
