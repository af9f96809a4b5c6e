"""Everything about a search that can be wrong, checked before anything of it starts."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from attention.checkpoint import Checkpoint
from attention.geometry import HeadGeometry
from attention.io.precision import DTYPES
from orchestrator import checkpoints
from orchestrator.cluster.room import room_for
from orchestrator.cluster.session import local_nodes, starts_ray
from orchestrator.config.schema import ConfigError, SearchConfig, check_training
from orchestrator.resources.accelerators import memory_of
from orchestrator.resources.processes import Needs
from orchestrator.resources.size import PlannedConversion, SearchInputs
from orchestrator.search.candidates import candidate_space, named_candidates, searcher_settings
from orchestrator.search.measurement_checks import check_decode_time, check_extras, check_tasks
from orchestrator.search.schedulers import SCHEDULERS
from orchestrator.search.searchers import SearchProblem, make_searcher
from orchestrator.search.texts import SearchTexts
from orchestrator.storage.paths import check_writable, storage_path


@dataclass(frozen=True)
class Prepared:
    """What validation found and made: geometry, candidates, texts. Those that are large are tokenised when there is a
    cluster (`texts.make_all`); `reused`: splits whose token set an earlier search had made."""

    geometry: HeadGeometry
    problem: SearchProblem
    texts: SearchTexts
    reused: tuple[str, ...]
    cache: Path

    @property
    def files(self) -> dict[str, Path]:
        """The folder of each split's token set."""
        return self.texts.folders


def open_models(config: SearchConfig, *, weights: bool = True) -> SearchConfig:
    """The configuration with the plain copies of its models where they are GGUF files or quantised: in the storage,
    which every node sees. Without `weights` (for estimates) they hold configs and tokenizers alone, in the user's
    cache. Raises ConfigError."""
    section, folders = config.model, {}
    cache = storage_path(config.storage) / "cache" if weights else None
    for key in ("path", "teacher"):
        if (source := getattr(section, key)) is not None:
            opening = {"dequantize": section.dequantize, "weights": weights, "cache": cache}
            folders[key] = checkpoints.resolve_model(source, key=f"model.{key}", **opening)
    return config.model_copy(update={"model": section.with_folders(**folders)})


def validate_search(config: SearchConfig) -> Prepared:
    """Check a configuration (`check_search`), and tokenise texts that are small into its storage. Raises as that."""
    prepared = check_search(config)
    storage_path(config.storage).mkdir(parents=True, exist_ok=True)
    prepared.texts.make_small()
    return prepared


def rehearse_search(config: SearchConfig) -> Prepared:
    """The same where nothing may be written: small texts are tokenised for their mistakes alone, into a folder that
    goes again."""
    prepared = check_search(config)
    with tempfile.TemporaryDirectory(prefix="headfold-") as folder:
        missing = {split: cut for split, cut in prepared.texts.cuts.items() if split not in prepared.reused}
        replace(prepared.texts, cache=Path(folder), cuts=missing).make_small()
    return prepared


def check_search(config: SearchConfig) -> Prepared:
    """Check a configuration against its checkpoint, its texts and its storage, as far as can be before texts are read.

    Nothing is written. Raises ConfigError or DataError naming key, value and remedy. What the cluster has is checked
    once it is connected.
    """
    length = config.data.sequence_length
    model = checkpoints.open_checkpoint(config.model.path, "model.path")
    geometry = model.geometry
    checkpoints.check_own_cache(model, "model.path")
    _check_length(length, config.model.path, geometry)
    if config.model.teacher:
        teacher = checkpoints.open_checkpoint(config.model.teacher, "model.teacher")
        _check_length(length, config.model.teacher, teacher.geometry)
        checkpoints.check_same_vocabulary(teacher, model, "model.teacher")
    problem = search_problem(config, geometry)
    check_searcher(config, problem)
    check_scheduler(config)
    check_training(config.train)
    check_training(config.promotion_train)
    check_tasks(config)
    check_extras(config, geometry)
    check_decode_time(config, geometry)
    check_accelerators(config, problem)
    if starts_ray():
        room_for(config, local_nodes())
    storage = storage_path(config.storage)
    check_writable(storage)
    texts = SearchTexts.check(config, model, storage / "cache" / "tokens")
    return Prepared(geometry, problem, texts, tuple(texts.there()), storage / "cache")


def search_problem(config: SearchConfig, geometry: HeadGeometry) -> SearchProblem:
    """What the searcher of a configuration is handed. Raises ConfigError for a candidate that cannot be."""
    section, named = config.search, named_candidates(config, geometry)
    space, params = candidate_space(config, geometry), searcher_settings(config)
    seeds, objectives = tuple(config.seeds), config.objectives
    return SearchProblem(space, named, section.num_samples, section.seed, params, seeds, objectives=objectives)


def search_inputs(config: SearchConfig, problem: SearchProblem) -> SearchInputs:
    """What the estimates of a search read. Raises ConfigError if nothing says which dtype the checkpoint has."""
    model = Checkpoint.open(config.model.path, "model.path")
    return SearchInputs(
        config=config,
        model=model.config,
        written=DTYPES[checkpoints.written_dtype(model, config.model.dtype)],
        candidates=tuple(PlannedConversion(c.recipe, c.kv_ratio, c.used_ratio) for c in problem.named),
    )


def check_accelerators(config: SearchConfig, problem: SearchProblem) -> None:
    """Raises ConfigError for a process that cannot fit the GPU that it asks for by type; nothing is looked at where
    there is no type, or one whose memory is not known."""
    section = config.resources
    if not any(kind and memory_of(kind) for kind in (section.accelerator_type, section.trial_accelerator_type)):
        return
    # The smallest statistics: what is kept of them is chosen later, by the room that there is
    if refusals := Needs(search_inputs(config, problem), "pooled").refusals():
        raise ConfigError("\n".join(refusals))


def check_scheduler(config: SearchConfig) -> None:
    """Raises ConfigError for a scheduler that does not exist, and for parameters that it does not have."""
    name = config.rungs.scheduler
    try:
        SCHEDULERS.get(name).settings(config.rungs.params)
    except ValueError as error:
        key = "params" if name in SCHEDULERS.names() else "scheduler"
        raise ConfigError(f"rungs.{key}: {error}") from None


def check_epochs(config: SearchConfig) -> None:
    """Raises ConfigError if the longest training, to the last rung and through the promotion, goes through a text more
    often than `data.max_epochs`."""
    length, section = config.data.sequence_length, config.promotion
    needed, promoted = config.rungs.steps[-1] * config.train.batch_size, 0
    if section.enabled:
        promoted = section.steps * config.promotion_train.batch_size
    steps = "rungs.steps"
    if section.data is not None:
        _check_epochs(config, "promotion.data.tokens", "promotion.steps", promoted, section.data.tokens // length)
    elif promoted:
        needed, steps = needed + promoted, "rungs.steps and promotion.steps"
    _check_epochs(config, "data.train.tokens", steps, needed, config.data.train.tokens // length)


def _check_epochs(config: SearchConfig, key: str, steps: str, needed: int, there: int) -> None:
    """`steps` take `needed` sequences of a text that has `there`."""
    length, most = config.data.sequence_length, config.data.max_epochs
    if needed > most * there:
        raise ConfigError(
            f"{key}: {steps} (each of train.batch_size sequences of data.sequence_length {length}) take "
            f"{needed * length} tokens, {needed / there:.3g} times the {there * length} of the text; set {key} to "
            f"{math.ceil(needed / most) * length}, or data.max_epochs to {math.ceil(needed / there)} to train on the "
            "same text again"
        )


def _check_length(length: int, path: str, geometry: HeadGeometry) -> None:
    if length > geometry.max_positions:
        raise ConfigError(
            f"data.sequence_length: got {length}, but {path!r} takes at most {geometry.max_positions} positions; "
            "choose a shorter one"
        )


def check_searcher(config: SearchConfig, problem: SearchProblem) -> None:
    """Build the searcher once: it says itself what it cannot do."""
    try:
        make_searcher(config.search.searcher, problem)
    except ValueError as error:
        message = str(error)
        place = "search.params: searcher.*" if " has no setting " in message else "search.searcher"
        raise ConfigError(message if message.startswith("search.") else f"{place}: {message}") from None
