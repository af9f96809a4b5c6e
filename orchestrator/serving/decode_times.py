"""Decode time of any plan in an engine, looked up.

The engine is timed once per search, at a few head counts. Layers are computed one after another, so
that the time of a model is a part common to all plans plus a time for each layer. With as many KV
heads in every layer it is T(heads); a plan's is then the mean of T over its layers, and the common
part needs no separate measurement. Between measured counts T is taken to be linear: decoding reads
the cache.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attention.conversion.convert import convert
from attention.geometry import HeadGeometry
from attention.io import checkpoint
from attention.io.targets import EngineSupport, target
from attention.plan import AttentionPlan, LayerPlan
from orchestrator import checkpoints
from orchestrator.serving import speed
from orchestrator.serving.engines import engine as engine_named

TOKENS = 32  # after each prompt
_CACHE = 2**32  # bytes that an engine may need to be given; no time depends on it


@dataclass(frozen=True)
class DecodeTimes:
    """Seconds of one token of one sequence, by the KV heads that a model holds in every layer.

    Attributes:
        target: As it was exported for the engine.
        context_length: Tokens at which it was decoded.
        heads: Rising.
        seconds: As many.
    """

    target: str
    engine: str
    version: str
    context_length: int
    heads: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, support: EngineSupport) -> float:
        """Return the seconds per token of a plan, by what the engine holds of it."""
        counts = [
            (keys + values) / 2
            for keys, values in zip(support.key_heads, support.value_heads, strict=True)
        ]
        return float(np.mean(np.interp(counts, self.heads, self.seconds)))


def measure_decode_times(
    path: str,
    target_name: str,
    context_length: int,
    dtype: str,
    python: str | None = None,
    seed: int = 0,
) -> DecodeTimes:
    """Time the target's first engine at every divisor of the stored KV heads, in turn.

    The weights are those of the checkpoint with neighbouring heads averaged: how fast they are does
    not depend on their values.

    Args:
        dtype: Of the exports.

    Raises:
        EngineError: If the engine is not installed.
        EngineFailure: If the engine fails.
        TargetError: For a family that the target does not hold.
    """
    engine = engine_named(target(target_name).engines[0])
    interpreter = engine.find(python)
    original = checkpoints.open_checkpoint(path, "model.path")
    model = checkpoints.load_working(original, dtype)
    geometry = original.geometry
    with tempfile.TemporaryDirectory(prefix="headfold-") as folder:
        models = {}
        for heads in divisors(geometry.num_kv_heads):
            source = Path(folder) / f"source-{heads}"
            checkpoint.save(convert(model, equal_plan(geometry, heads)), source, path)
            out = Path(folder) / str(heads)
            models[str(heads)] = speed.exported(
                f"{heads} KV heads", source, engine, out, dtype, target_name=target_name
            )
        del model
        prompts = speed.random_prompts([context_length - TOKENS], models, seed)
        answers = speed.rounds(engine, interpreter, models, prompts, TOKENS, _CACHE)
    seconds = {int(key): statistics.median(_of_a_token(each)) for key, each in answers.items()}
    version = next(iter(answers.values()))[0].version
    heads = tuple(sorted(seconds))
    return DecodeTimes(
        target_name,
        engine.name,
        version,
        context_length,
        heads,
        tuple(seconds[count] for count in heads),
    )


def _of_a_token(answers: list[speed.SpeedAnswer]) -> list[float]:
    return [rest / (TOKENS - 1) for answer in answers for _, rest in answer.seconds[0]]


def divisors(count: int) -> list[int]:
    """Return the divisors of a count, ascending."""
    return [part for part in range(1, count + 1) if count % part == 0]


def equal_plan(geometry: HeadGeometry, heads: int) -> AttentionPlan:
    """Return the plan of `heads` groups of neighbouring stored heads, in every layer."""
    groups = tuple(unit * heads // geometry.num_kv_heads for unit in geometry.kv_map)
    return AttentionPlan(
        (LayerPlan(groups, groups),) * geometry.num_layers,
        geometry.head_dim,
        other_layers=geometry.other_layers,
    )
