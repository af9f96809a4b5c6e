"""`headfold evaluate --engine ENGINE --cache-types`: a model in several formats of the cache.

Loss, bytes and speed are those of the engine itself: it scores the held-out text and reports its
cache. What our runtime computes of the same formats is `headfold evaluate --cache-format`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from attention.base.progress import stage
from attention.cache_formats import (
    AS_WEIGHTS,
    LLAMA_CPP,
    VLLM,
    CacheFormatError,
    CachePair,
    read_pairs,
)
from attention.checkpoint import Checkpoint
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError
from orchestrator.evaluation.long_context import SHORTEST, context_lengths
from orchestrator.serving.check import MEMORY
from orchestrator.serving.engine import Engine, EngineFailure, ScoreQuestion, TextScores
from orchestrator.serving.engines import engine as engine_named
from orchestrator.serving.speed import (
    REPETITIONS,
    ROUNDS,
    Exported,
    ModelSpeed,
    exported,
    medians,
    random_prompts,
    rounds,
)
from trainers.evaluation import comparison

SCORED_TOKENS = 2048
"""Default: llama.cpp scores one token per request."""
_SECONDS = 4 * 3600  # that it may take to score the text in one format
_REFERENCES = {LLAMA_CPP: CachePair.parse("f16"), VLLM: AS_WEIGHTS}
"""What losses and bytes are compared with in each engine; always measured."""
_Row = tuple[str, CachePair]


class CacheTypeRow(TypedDict):
    """A model with its cache in one format, in the engine.

    The increase is that of the loss over the reference, in nats per token, with its standard error
    over the sequences.
    """

    model: str
    cache_format: str
    loss: float
    perplexity: float
    loss_increase: float
    loss_increase_stderr: float | None
    kv_bytes_per_token: float
    """Bytes that the engine reports."""
    share: float
    """Share of the bytes of the reference."""
    sequences: int
    """Sequences of the context length that fit in the memory."""
    prefill_tokens_per_second: NotRequired[float]
    """Neither speed is there if no tokens were to be decoded."""
    decode_tokens_per_second: NotRequired[float]


class CacheTypesRecord(TypedDict):
    """The JSON of `headfold evaluate --engine ENGINE --cache-types`."""

    engine: str
    version: str
    device: str
    checkpoint: str
    original: NotRequired[str]
    reference: str
    """The model that losses and bytes are compared with, in the format of the first row."""
    eval_data: str
    sequence_length: int
    eval_tokens: int
    """Tokens that are scored in every row."""
    left_out_tokens: int
    """Tokens that end within a character, of which llama.cpp reports no log-probability."""
    context_length: int
    speed_tokens: int
    measurements: int
    memory: int
    dtype: str
    seed: int
    cache_types: list[CacheTypeRow]


def cache_types_record(
    models: Mapping[str, Checkpoint],
    pairs: Sequence[CachePair],
    sequences: Tensor,
    eval_data: str,
    *,
    engine: str,
    python: str | None = None,
    length: str | None = None,
    tokens: int = 32,
    memory: int = MEMORY,
    dtype: str = checkpoints.AUTO,
    seed: int = 0,
) -> CacheTypesRecord:
    """Measure models with their caches in several formats in an engine.

    Each model is exported once. Speeds are medians as in `orchestrator.serving.speed`, of all rows
    in turn.

    Args:
        models: By what they are: `checkpoint`, and `original` if there is one.
        pairs: As of `read_cache_types`.
        sequences: Held-out text, `[N, T]`.
        eval_data: Its source, for the record.
        engine: Its name.
        python: An interpreter that has it.
        length: The context length of the speed; None for T, or the shortest that is timed.
        tokens: To decode for the speed; 0 for no speed.
        memory: Bytes of cache in which sequences are to fit.
        dtype: Of the weights.
        seed: Of the prompts of the speed.

    Raises:
        EngineError: If the engine is not installed, before any work.
        EngineFailure: If the engine fails.
        ConfigError: For what a user can mend.
    """
    chosen = engine_named(engine)
    interpreter = chosen.find(python)
    positions = min(model.geometry.max_positions for model in models.values())
    at = context_lengths(length or str(max(SHORTEST, sequences.shape[1])), positions)
    if len(at) > 1:
        raise ConfigError(f"context_lengths: --cache-types takes one context length, got {length}")
    if tokens and not 2 <= tokens < at[0]:
        raise ConfigError(
            f"speed_tokens: expected at least 2 tokens to decode, and fewer than the context of "
            f"{at[0]}, or 0 for no speed; got {tokens}"
        )
    with tempfile.TemporaryDirectory(prefix="headfold-") as folder:
        files = {
            key: exported(key, model.path, chosen, Path(folder) / key, dtype)
            for key, model in reversed(list(models.items()))  # the original first
        }
        rows: dict[_Row, Exported] = {
            (key, pair): replace(file, cache=pair) for key, file in files.items() for pair in pairs
        }
        scores = _scores(chosen, interpreter, rows, sequences)
        speeds: dict[_Row, ModelSpeed] = {}
        if tokens:
            prompts = random_prompts([at[0] - tokens], files, seed)
            answers = rounds(chosen, interpreter, rows, prompts, tokens, memory)
            speeds = {row: medians(at[0], 0, tokens, each) for row, each in answers.items()}
    losses = {row: _losses(each) for row, each in scores.items()}
    reference = next(iter(rows))
    scored = ~torch.stack([each.isnan() for each in losses.values()]).any(dim=0)
    return CacheTypesRecord(
        engine=chosen.name,
        version=scores[reference].version,
        device=scores[reference].device,
        **{key: model.name for key, model in models.items()},
        reference=reference[0],
        eval_data=eval_data,
        sequence_length=sequences.shape[1],
        eval_tokens=int(scored.sum()),
        left_out_tokens=int((~scored).sum()),
        context_length=at[0],
        speed_tokens=tokens,
        measurements=ROUNDS * REPETITIONS if tokens else 0,
        memory=memory,
        dtype=files[reference[0]].dtype,
        seed=seed,
        cache_types=_table(scores, losses, scored, speeds, memory // at[0]),
    )


def read_cache_types(text: str | Sequence[str], engine: str) -> tuple[CachePair, ...]:
    """Return the formats that are to be measured in an engine, that of the reference first.

    Raises:
        ConfigError: For formats that are unknown, listed twice, or not of the engine; and for an
            engine whose cache has none.
    """
    name = next((each for each in _REFERENCES if each.lower() == engine.lower()), None)
    if name is None:
        raise ConfigError(
            f"cache_types: measured in {' or '.join(_REFERENCES)}, got {engine}; leave out "
            f"--cache-types, or take --engine {LLAMA_CPP}"
        )
    reference = _REFERENCES[name]
    entries = [each.strip() for each in (text.split(",") if isinstance(text, str) else text)]
    if entries.count(reference.name) > 1:
        raise ConfigError(f"cache_types: {reference.name} is listed twice; list each format once")
    try:
        pairs = read_pairs([each for each in entries if each != reference.name])
    except CacheFormatError as error:
        raise ConfigError(f"cache_types: {error}") from None
    for pair in pairs:
        if name not in pair.engines:
            raise ConfigError(f"cache_types: {name} has no cache in {pair.name}")
    return (reference, *pairs)


def _scores(
    engine: Engine, python: str, rows: Mapping[_Row, Exported], sequences: Tensor
) -> dict[_Row, TextScores]:
    """Return the log-probabilities and the cache's bytes of each row, by the engine."""
    assert engine.score is not None
    scores: dict[_Row, TextScores] = {}
    with stage(f"loss in {engine.name}", len(rows), "runs") as progress:
        for row, model in rows.items():
            question = ScoreQuestion(
                folder=model.folder,
                sequences=sequences.tolist(),
                dtype=model.dtype,
                support=model.support,
                cache=row[1],
                seconds=_SECONDS,
                own_code=model.own_code,
            )
            scores[row] = engine.score(python, question)
            progress.step()
    return scores


def _table(
    scores: Mapping[_Row, TextScores],
    losses: Mapping[_Row, Tensor],
    scored: Tensor,
    speeds: Mapping[_Row, ModelSpeed],
    memory: int,
) -> list[CacheTypeRow]:
    """Return the row of each model in each format; the first one is the reference.

    Args:
        scores: What the engine reports.
        losses: Of each token.
        scored: The tokens that have a loss in every row.
        speeds: Of each row; empty if none were measured.
        memory: Bytes of cache for each token of a sequence.
    """
    reference = next(iter(scores))
    loss_before = float(losses[reference][scored].mean())
    before = _means(losses[reference], scored)
    table: list[CacheTypeRow] = []
    for row, tokens in losses.items():
        loss = float(tokens[scored].mean())
        compared = comparison(loss, loss_before, _means(tokens, scored), before)
        size = scores[row].kv_bytes_per_token
        entry = CacheTypeRow(
            model=row[0],
            cache_format=row[1].name,
            loss=loss,
            perplexity=compared["perplexity"],
            loss_increase=compared["loss_increase"],
            loss_increase_stderr=compared["loss_increase_stderr"],
            kv_bytes_per_token=size,
            share=size / scores[reference].kv_bytes_per_token,
            sequences=int(memory // size),
        )
        if row in speeds:
            entry["prefill_tokens_per_second"] = speeds[row]["prefill_tokens_per_second"]
            entry["decode_tokens_per_second"] = speeds[row]["decode_tokens_per_second"]
        table.append(entry)
    return table


def _losses(scores: TextScores) -> Tensor:
    """Return the loss of each token but the first of each sequence; NaN for those left out."""
    rows = [[torch.nan if x is None else -x for x in row] for row in scores.log_probabilities]
    losses = torch.tensor(rows, dtype=torch.float64)
    if bool(losses.isnan().all(dim=1).any()):
        raise EngineFailure("the engine reports no log-probability of any token of a sequence")
    return losses


def _means(losses: Tensor, scored: Tensor) -> Tensor:
    """Return the mean loss of each sequence over the tokens that are scored, `[N]`."""
    return torch.stack([row[read].mean() for row, read in zip(losses, scored, strict=True)])
