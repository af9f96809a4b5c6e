"""Everything about a search that can be wrong, checked before anything of it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention.geometry import HeadGeometry
from orchestrator import models
from orchestrator.candidates import candidate_space, named_candidates
from orchestrator.config import ConfigError, SearchConfig
from orchestrator.folders import check_writable, storage_path
from orchestrator.searchers import SEARCHERS, SearchProblem
from trainers.data import DataError, sequence_file


@dataclass(frozen=True)
class Prepared:
    """What validation found and made: geometry, candidates, token files (kept in the storage and reused)."""

    geometry: HeadGeometry
    problem: SearchProblem
    train_file: Path
    eval_file: Path
    calibration_file: Path
    cache: Path


def validate_search(config: SearchConfig) -> Prepared:
    """Check a configuration against its checkpoint, its texts and its storage, and tokenise the texts.

    Raises ConfigError or DataError naming key, value and remedy. What the cluster has is checked once it is connected.
    """
    length = config.data.sequence_length
    geometry = models.geometry_of(config.model.path)
    if length > geometry.max_positions:
        raise ConfigError(
            f"data.sequence_length: got {length}, but {config.model.path!r} takes at most {geometry.max_positions} "
            "positions; choose a shorter one"
        )
    named = named_candidates(config, geometry)
    space = candidate_space(config, geometry)
    problem = SearchProblem(space, named, config.search.samples, config.search.seed)
    check_searcher(config, problem)
    storage = storage_path(config.storage)
    check_writable(storage)
    files = token_files(config, storage / "cache")
    return Prepared(geometry, problem, files["train"], files["eval"], files["calibration"], storage / "cache")


def check_searcher(config: SearchConfig, problem: SearchProblem) -> None:
    """Build the searcher once: it says itself what it cannot do."""
    try:
        SEARCHERS.get(config.search.searcher)(problem)
    except ValueError as error:
        message = str(error)
        raise ConfigError(message if message.startswith("search.") else f"search.searcher: {message}") from None


def token_files(config: SearchConfig, cache: Path) -> dict[str, Path]:
    """The token sequences of each split, as safetensors files. Raises DataError naming split and source."""
    tokenizer: Any = models.load_tokenizer(config.model.path)
    files = {}
    for split in ("train", "eval", "calibration"):
        source, tokens = config.data.section(split)
        try:
            files[split] = sequence_file(
                source,
                tokenizer,
                split=split,  # pyright: ignore[reportArgumentType]
                tokens=tokens,
                sequence_length=config.data.sequence_length,
                seed=config.search.seed,
                cache_dir=cache / "tokens",
                text_field=config.data.text_field,
            )
        except DataError as error:
            raise DataError(f"data.{split}: source {source!r}: {error}") from None
    return files
