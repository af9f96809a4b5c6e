"""`headfold evaluate --engine`: prefill and decode speed, and the sequences that fit.

They are measured in the engine itself.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

import torch
from gguf import GGUFReader

from attention.base.progress import stage
from attention.cache_formats import CachePair
from attention.checkpoint import Checkpoint
from attention.io.export import REPORT_FILE, LargerCacheError
from attention.io.targets import EngineSupport, TargetError, targets
from attention.modeling.model_classes import plan_of_config
from attention.plan import number_bytes
from orchestrator import checkpoints
from orchestrator.config.options import ExportOptions
from orchestrator.config.schema import ConfigError
from orchestrator.evaluation.long_context import context_lengths
from orchestrator.serving.check import MEMORY
from orchestrator.serving.engine import Engine, SpeedAnswer, SpeedQuestion
from orchestrator.serving.engines import engine as engine_named
from orchestrator.serving.export import export_checkpoint

ROUNDS = 3
"""In each, every model is loaded once, in turn, so that a change of load strikes all of them."""
REPETITIONS = 3  # of each prompt in a round
ModelKey = TypeVar("ModelKey")
SPEEDS = ("prefill_tokens_per_second", "decode_tokens_per_second")


class ModelSpeed(TypedDict):
    """Medians of a model at one context length, and the sequences of it that fit."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    sequences: int


class SpeedFacts(TypedDict):
    """A model as the engine has loaded it."""

    target: str
    dtype: str
    cache_dtype: str
    kv_bytes_per_token: float
    capacity: int


class SpeedRecord(TypedDict):
    """The JSON of `headfold evaluate --engine`."""

    engine: str
    version: str
    checkpoint: str
    original: NotRequired[str]
    speed_tokens: int
    measurements: int
    memory: int
    seed: int
    models: Mapping[str, SpeedFacts]
    context_lengths: Sequence[Mapping[str, Any]]
    """At each: `context_length`, the speeds of each model, and `ratios`."""


@dataclass(frozen=True)
class Exported:
    """A folder that the engine loads, by its absolute path.

    Attributes:
        target: As it was exported, in `dtype`.
        own_code: Whether it has Python files.
        cache: The formats of the cache; None for the engine's own choice.
    """

    folder: Path
    target: str
    dtype: str
    support: EngineSupport
    vocabulary: int
    positions: int
    own_code: bool
    cache: CachePair | None = None


def engine_speed(
    path: str | Path,
    original: str | Path | None = None,
    *,
    engine: str,
    python: str | None = None,
    lengths: str = "max",
    tokens: int = 32,
    memory: int = MEMORY,
    dtype: str = checkpoints.AUTO,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> SpeedRecord:
    """Measure the speed of one sequence at a time, as medians over rounds and repetitions.

    A sequence is a prompt of random tokens, and `tokens` generated after it, that together have a
    context length. A checkpoint that is not an export for the engine is exported for it, to a
    temporary folder.

    Args:
        lengths: As in `context_lengths`.
        memory: Bytes of cache.

    Raises:
        EngineError: If the engine is not installed, before any work.
        EngineFailure: If the engine fails.
        ConfigError: For what a user can mend.
    """
    chosen = engine_named(engine)
    interpreter = chosen.find(python)
    if tokens < 2:
        raise ConfigError(
            f"speed_tokens: the speed in an engine needs at least 2 tokens to decode, got {tokens}"
        )
    sources = {"checkpoint": path} | ({} if original is None else {"original": original})
    paths = {key: _resolved(name, key) for key, name in sources.items()}
    for key, name in paths.items():  # both, before the first is exported
        if not is_export(name):
            context_lengths(lengths, checkpoints.open_checkpoint(name, key).geometry.max_positions)
    with tempfile.TemporaryDirectory(prefix="headfold-") as folder:
        models = {
            key: exported(key, name, chosen, Path(folder) / key, dtype, trust_remote_code)
            for key, name in paths.items()
        }
        at = context_lengths(lengths, min(model.positions for model in models.values()))
        if at[0] <= tokens:
            raise ConfigError(
                f"speed_tokens: {tokens} leave no prompt in a context of {at[0]}; give fewer"
            )
        prompts = random_prompts([length - tokens for length in at], models, seed)
        answers = rounds(chosen, interpreter, models, prompts, tokens, memory)
    return SpeedRecord(
        engine=chosen.name,
        version=answers["checkpoint"][0].version,
        **{key: str(name) for key, name in sources.items()},
        speed_tokens=tokens,
        measurements=ROUNDS * REPETITIONS,
        memory=memory,
        seed=seed,
        models={key: _facts(models[key], answers[key][0]) for key in models},
        context_lengths=[_at(length, index, tokens, answers) for index, length in enumerate(at)],
    )


def _resolved(name: str | Path, key: str) -> str | Path:
    """Return the path of an export as it is, and of another model that of its plain copy."""
    return name if is_export(name) else checkpoints.resolve_model(name, key=key)


def is_export(name: str | Path) -> bool:
    """Return whether a path is a folder that `headfold export` wrote."""
    return (Path(name) / REPORT_FILE).is_file()


def exported(
    key: str,
    name: str | Path,
    engine: Engine,
    out: Path,
    dtype: str,
    trusted: bool = False,
    target_name: str | None = None,
) -> Exported:
    """Return a checkpoint as the engine loads it.

    It is as it is if it is an export for the engine, else exported to `out`, by the target with the
    smallest cache unless one is named.
    """
    exists = is_export(name)
    folder = Path(name) if exists else out
    if not exists:
        source = Checkpoint.open(name)
        written = checkpoints.written_dtype(source, dtype)
        target = target_name or _target(key, engine, source.config, written)
        try:
            export_checkpoint(ExportOptions(checkpoint=source, target=target, out=out, dtype=dtype))
        except LargerCacheError as error:
            raise ConfigError(
                f"{key}: {error} of the verb export, and give its folder here"
            ) from None
    record = json.loads((folder / REPORT_FILE).read_text(encoding="utf-8"))
    if engine.name not in record["engines"]:
        engines = " and ".join(record["engines"])
        raise ConfigError(
            f"{key}: {str(name)!r} was exported for {engines}, not for {engine.name}; "
            "give its source here"
        )
    own_code = any(folder.glob("*.py"))
    if exists and own_code and not trusted:
        raise ConfigError(
            f"{key}: {str(name)!r} has Python files that {engine.name} must run; read them, and "
            "add --trust-remote-code, or give the checkpoint that it was exported from"
        )
    vocabulary, positions = _limits(folder)
    pairs = 2 * sum(record["kv_heads"]) * number_bytes(record["cache_dtype"])
    support = EngineSupport.of(record["kv_heads"], record["kv_bytes_per_token_after"] // pairs)
    return Exported(
        folder.absolute(),
        record["target"],
        record["dtype"],
        support,
        vocabulary,
        positions,
        own_code,
    )


def _target(key: str, engine: Engine, config: Any, dtype: str) -> str:
    """Return the engine's target with the smallest cache, among equals that of more engines."""
    costs: dict[str, tuple[int, int]] = {}
    reasons: list[str] = []
    plan = plan_of_config(config)
    for name, target in targets().items():
        if engine.name in (engines := target.engines_of(config, plan)):
            try:
                cache_bytes = target.support_for(config, plan).bytes_per_token(dtype)
                costs[name] = (cache_bytes, -len(engines))
            except TargetError as error:
                reasons.append(f"{name}: {error}")
    if not costs:
        raise ConfigError(f"{key}: {engine.name} cannot hold it ({'; '.join(reasons)})")
    return min(costs, key=lambda name: costs[name])


def _limits(folder: Path) -> tuple[int, int]:
    """Return the tokens of the vocabulary, and of the longest context."""
    if (file := folder / "model.gguf").is_file():
        fields = GGUFReader(file).fields
        vocabulary, positions = (
            next(int(field.contents()) for name, field in fields.items() if name.endswith(key))
            for key in (".vocab_size", ".context_length")
        )
        return vocabulary, positions
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config["vocab_size"], config.get("max_position_embeddings") or config["n_positions"]


def random_prompts(
    sizes: Sequence[int], models: Mapping[str, Exported], seed: int
) -> list[list[int]]:
    """Return random token ids of the vocabulary of all models."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = min(model.vocabulary for model in models.values())
    return [torch.randint(vocabulary, (size,), generator=generator).tolist() for size in sizes]


def rounds(
    engine: Engine,
    python: str,
    models: Mapping[ModelKey, Exported],
    prompts: list[list[int]],
    tokens: int,
    memory: int,
) -> dict[ModelKey, list[SpeedAnswer]]:
    """Return the answers of each model, of every round; the order is reversed each time."""
    answers: dict[ModelKey, list[SpeedAnswer]] = {key: [] for key in models}
    turns = [key for turn in range(ROUNDS) for key in list(models)[:: -1 if turn % 2 else 1]]
    with stage(f"speed in {engine.name}", len(turns), "runs") as progress:
        for key in turns:
            model = models[key]
            question = SpeedQuestion(
                folder=model.folder,
                prompts=prompts,
                tokens=tokens,
                repetitions=REPETITIONS,
                dtype=model.dtype,
                support=model.support,
                memory=memory,
                own_code=model.own_code,
                cache=model.cache,
            )
            answers[key].append(engine.time(python, question))
            progress.step()
    return answers


def _facts(model: Exported, answer: SpeedAnswer) -> SpeedFacts:
    return {
        "target": model.target,
        "dtype": model.dtype,
        "cache_dtype": answer.cache_dtype,
        "kv_bytes_per_token": answer.kv_bytes_per_token,
        "capacity": answer.capacity,
    }


def medians(length: int, index: int, tokens: int, rounds_of: Sequence[SpeedAnswer]) -> ModelSpeed:
    """Return the speeds of a model at one context length, and the sequences that fit.

    Args:
        length: The context length.
        index: Of its prompt in the answers.
        tokens: Generated after the prompt.
        rounds_of: The answers of all rounds.
    """
    seconds = [pair for answer in rounds_of for pair in answer.seconds[index]]
    prefill = statistics.median((length - tokens) / first for first, _ in seconds)
    decode = statistics.median((tokens - 1) / rest for _, rest in seconds)
    return ModelSpeed(
        prefill_tokens_per_second=prefill,
        decode_tokens_per_second=decode,
        sequences=rounds_of[0].capacity // length,
    )


def _at(
    length: int, index: int, tokens: int, answers: Mapping[str, Sequence[SpeedAnswer]]
) -> Mapping[str, Any]:
    """Return the figures of each model at one context length, and their ratios.

    The ratios are the checkpoint's to the original's; None where that fits no sequence.
    """
    figures: dict[str, Any] = {"context_length": length}
    for key, rounds_of in answers.items():
        figures[key] = medians(length, index, tokens, rounds_of)
    if "original" in answers:
        checkpoint, original = figures["checkpoint"], figures["original"]
        figures["ratios"] = {
            name: checkpoint[name] / original[name] if original[name] else None
            for name in checkpoint
        }
    return figures
