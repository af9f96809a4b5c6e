"""What a search is to measure beside loss and bytes, checked before anything starts: decode time in an engine; tasks,
prompts and long contexts of the promotion."""

from __future__ import annotations

from attention.geometry import HeadGeometry
from attention.io.targets import target
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError, SearchConfig
from orchestrator.evaluation.generations import encode_prompts
from orchestrator.evaluation.long_context import NUM_TEXTS, context_lengths
from orchestrator.evaluation.task_files import ACCURACIES, accuracy_of
from orchestrator.evaluation.tasks import HarnessTasks
from orchestrator.serving.decode_times import TOKENS
from orchestrator.serving.engine import EngineError
from orchestrator.serving.engines import engine


def check_extras(config: SearchConfig, geometry: HeadGeometry) -> None:
    """Raises ConfigError for prompts and context lengths of the promotion that the model does not take, or for which
    there is too little held-out text."""
    section = config.promotion
    if not (section.enabled and (section.prompts or section.context_lengths)):
        return
    try:
        if section.prompts:
            encode_prompts(section.prompts, checkpoints.load_tokenizer(config.model.path), geometry.max_positions)
        if section.context_lengths:
            longest = context_lengths(",".join(map(str, section.context_lengths)), geometry.max_positions)[-1]
            needed, there = NUM_TEXTS * longest, config.data.eval.tokens
            if needed > there:
                raise ConfigError(
                    f"context_lengths: {longest} take {needed} held-out tokens, data.eval.tokens are {there}; set "
                    f"data.eval.tokens to {needed}, or choose a shorter context"
                )
    except ConfigError as error:
        raise ConfigError(f"promotion.{error}") from None


def check_tasks(config: SearchConfig) -> None:
    """Raises ConfigError for tasks of the promotion that cannot be run, or not be compared as its gate asks."""
    section = config.promotion
    if not (section.enabled and section.tasks):
        return
    try:
        metrics = HarnessTasks(section.tasks).metrics
    except ConfigError as error:
        raise ConfigError(f"promotion.{error}") from None
    if section.max_task_drop is not None and (without := [n for n, m in metrics.items() if not accuracy_of(m)]):
        raise ConfigError(
            f"promotion.max_task_drop: task {without[0]!r} has no accuracy ({', '.join(ACCURACIES)}), but "
            f"{', '.join(metrics[without[0]])}; leave it out of promotion.tasks, or max_task_drop"
        )


def check_decode_time(config: SearchConfig, geometry: HeadGeometry) -> None:
    """Raises ConfigError where no engine can be timed at `search.decode_context_length`."""
    length, name = config.search.decode_context_length, config.search.target
    if length is None:
        return
    key = f"search.decode_context_length: got {length}"
    if name == "any":
        raise ConfigError(f"{key} with search.target any: which engine? set search.target, e.g. to llama.cpp")
    if not TOKENS < length <= geometry.max_positions:
        raise ConfigError(
            f"{key}, expected more than the {TOKENS} tokens that are decoded, and at most the "
            f"{geometry.max_positions} positions of {config.model.path!r}"
        )
    try:
        engine(target(name).engines[0]).find(None)
    except EngineError as error:
        raise ConfigError(f"{key}: {error}") from None
