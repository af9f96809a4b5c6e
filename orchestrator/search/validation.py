"""Checks of a search, before any part of it starts."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from attention.checkpoint import Checkpoint
from attention.geometry import HeadGeometry
from attention.io.targets import target
from orchestrator import checkpoints
from orchestrator.cluster.capacity import search_concurrency
from orchestrator.cluster.session import local_nodes, starts_ray
from orchestrator.config.parsing import parse_section, shown
from orchestrator.config.schema import (
    ConfigError,
    SearchConfig,
    check_training,
    check_worker_gpus,
)
from orchestrator.evaluation.generations import encode_prompts
from orchestrator.evaluation.long_context import NUM_TEXTS, check_words, context_lengths
from orchestrator.evaluation.task_files import ACCURACIES, accuracies_of
from orchestrator.evaluation.tasks import HarnessTasks
from orchestrator.resources.accelerators import memory_of
from orchestrator.resources.processes import Needs
from orchestrator.search.schedulers import SCHEDULERS
from orchestrator.search.searchers import SearchProblem, make_searcher
from orchestrator.search.setup import SearchSetup
from orchestrator.search.texts import SearchTexts
from orchestrator.search.trials.context import relaxation_changes, relaxation_sequences
from orchestrator.serving.decode_times import TOKENS
from orchestrator.serving.engine import EngineError
from orchestrator.serving.engines import engine
from orchestrator.storage.paths import check_writable, storage_path
from orchestrator.tracking.wandb_trials import check_wandb
from search_spaces.recipes.recipe import Recipe
from trainers.settings import TrainSettings


@dataclass(frozen=True)
class Prepared:
    """A search that has passed its checks.

    Attributes:
        setup: Its configuration with the checkpoint open.
        texts: Its texts; large ones are tokenised once there is a cluster (`SearchTexts.make_all`).
        reused: Splits whose token set an earlier search has made.
        cache: The folder that the searches of one storage share.
    """

    setup: SearchSetup
    texts: SearchTexts
    reused: tuple[str, ...]
    cache: Path

    @property
    def geometry(self) -> HeadGeometry:
        return self.setup.geometry

    @property
    def problem(self) -> SearchProblem:
        """The input of the searcher."""
        return self.setup.problem

    @property
    def files(self) -> dict[str, Path]:
        """The folder of each split's token set."""
        return self.texts.folders


def validate_search(config: SearchConfig) -> Prepared:
    """Check a configuration (`check_search`), and tokenise small texts into its storage."""
    prepared = check_search(config)
    storage_path(config.storage).mkdir(parents=True, exist_ok=True)
    prepared.texts.make_small()
    return prepared


def rehearse_search(config: SearchConfig) -> Prepared:
    """Check a configuration as `validate_search` does, without writing to the storage.

    Small texts are tokenised into a temporary folder, only to find mistakes.
    """
    prepared = check_search(config)
    with tempfile.TemporaryDirectory(prefix="headfold-") as folder:
        missing = {
            split: cut for split, cut in prepared.texts.cuts.items() if split not in prepared.reused
        }
        replace(prepared.texts, cache=Path(folder), cuts=missing).make_small()
    return prepared


def check_search(config: SearchConfig) -> Prepared:
    """Check a configuration against its checkpoint, its texts and its storage.

    Nothing is written, and no text is read. The resources of the cluster are checked once it is
    connected.

    Raises:
        ConfigError: Naming key, value and remedy. Likewise DataError of texts.
    """
    length = config.data.sequence_length
    setup = SearchSetup.open(config)
    model, geometry = setup.model, setup.geometry
    checkpoints.check_own_cache(model, "model.path")
    _check_length(length, config.model.path, geometry)
    if config.model.teacher:
        teacher = checkpoints.open_checkpoint(config.model.teacher, "model.teacher")
        _check_length(length, config.model.teacher, teacher.geometry)
        checkpoints.check_same_vocabulary(teacher, model, "model.teacher")
    check_recoveries(setup)
    check_searcher(config, setup.problem)
    check_scheduler(config)
    check_training(config.train)
    check_training(config.promotion_train)
    check_tasks(config, setup.model)
    check_extras(config, model)
    check_decode_time(config, geometry)
    check_accelerators(setup)
    check_wandb(config.tracking.wandb)
    if starts_ray():
        search_concurrency(config, local_nodes())
    storage = storage_path(config.storage)
    check_writable(storage)
    texts = SearchTexts.check(config, model, storage / "cache" / "tokens")
    return Prepared(setup, texts, tuple(texts.complete()), storage / "cache")


def check_recoveries(setup: SearchSetup) -> None:
    """Raise ConfigError for a candidate whose training the other settings do not allow."""
    train, promotion = setup.config.train.model_dump(), setup.config.promotion
    for candidate in setup.problem.named:
        changes = candidate.recipe.apply("recovery")
        where = f"with search.recipes: {candidate.recipe.name} ({shown(changes)})"
        parse_section(TrainSettings, train | changes, f"train {where}")
        if promotion.enabled and promotion.steps:
            parse_section(TrainSettings, train | changes | promotion.train, f"promotion {where}")
        if relaxed := relaxation_changes(candidate.recipe.knobs("relaxation")):
            where = f"with search.recipes: {candidate.recipe.name} (relaxation: {shown(relaxed)})"
            parse_section(TrainSettings, {**train, **changes, **relaxed}, f"train {where}")
    if setup.problem.samples:
        prefix = "relaxation."
        drawn = {
            name.removeprefix(prefix): value
            for name, value in setup.config.search.params.items()
            if name.startswith(prefix)
        }
        relaxed = relaxation_changes(drawn)
        where = f"with search.params (relaxation: {shown(relaxed)})"
        parse_section(TrainSettings, {**train, **relaxed}, f"train {where}")


def check_accelerators(setup: SearchSetup) -> None:
    """Raise ConfigError for a process that cannot fit the GPU type that it requests.

    Nothing is checked without a type, or if its memory is not known.
    """
    section, promotion = setup.config.resources, setup.config.promotion.resources
    kinds = section.accelerator_type, section.trial_accelerator_type, promotion.accelerator_type
    if not any(kind and memory_of(kind) for kind in kinds):
        return
    # The smallest statistics: their form is chosen later, depending on free space
    if refusals := Needs(setup.inputs, "pooled").refusals():
        raise ConfigError("\n".join(refusals))


def check_scheduler(config: SearchConfig) -> None:
    """Raise ConfigError for an unknown scheduler, and for parameters that it does not have."""
    name = config.rungs.scheduler
    try:
        SCHEDULERS.get(name).settings(config.rungs.params)
    except ValueError as error:
        key = "params" if name in SCHEDULERS.names() else "scheduler"
        raise ConfigError(f"rungs.{key}: {error}") from None


def check_epochs(config: SearchConfig, recipes: Iterable[Recipe] = ()) -> None:
    """Raise ConfigError if the longest training reads a text more often than `data.max_epochs`.

    The longest training goes to the last rung and through the promotion.

    Args:
        config: The configuration.
        recipes: Of the candidates, whose relaxations may have another batch size.
    """
    length, section = config.data.sequence_length, config.promotion
    steps, batch = config.rungs.steps, config.train.batch_size
    relaxed = max((0, *(relaxation_sequences(recipe, steps, batch) for recipe in recipes)))
    needed, promoted = steps[-1] * batch + relaxed, 0
    if section.enabled:
        promoted = section.steps * config.promotion_train.batch_size
    words = "rungs.steps"
    if relaxed:
        words = "rungs.steps and the larger relaxation.batch_size of search.recipes"
    if section.data is not None:
        _check_epochs(
            config,
            "promotion.data.tokens",
            "promotion.steps",
            promoted,
            section.data.tokens // length,
        )
    elif promoted:
        joint = ", and" if relaxed else " and"
        needed, words = needed + promoted, f"{words}{joint} promotion.steps"
    _check_epochs(config, "data.train.tokens", words, needed, config.data.train.tokens // length)


def check_gpus(config: SearchConfig) -> None:
    """Raise ConfigError if workers of the trials or of the promotion would leave GPUs idle."""
    check_worker_gpus(config.train, "train")
    if config.promotion.enabled and config.promotion.steps:
        check_worker_gpus(config.promotion_train, "promotion.train")


def _check_epochs(config: SearchConfig, key: str, steps: str, needed: int, there: int) -> None:
    """Raise ConfigError if `steps` take too many sequences (`needed`) of a text of `available`."""
    length, most = config.data.sequence_length, config.data.max_epochs
    if needed > most * there:
        raise ConfigError(
            f"{key}: {steps} (train.batch_size sequences of data.sequence_length {length} a step) "
            f"take {needed * length} tokens, {needed / there:.3g} times the {there * length} of "
            f"the text; set {key} to {math.ceil(needed / most) * length}, or data.max_epochs to "
            f"{math.ceil(needed / there)} to train on the same text again"
        )


def _check_length(length: int, path: str, geometry: HeadGeometry) -> None:
    if length > geometry.max_positions:
        raise ConfigError(
            f"data.sequence_length: got {length}, but {path!r} takes at most "
            f"{geometry.max_positions} positions; choose a shorter one"
        )


def check_searcher(config: SearchConfig, problem: SearchProblem) -> None:
    """Build the searcher once, since it validates its own settings."""
    try:
        make_searcher(config.search.searcher, problem)
    except ValueError as error:
        message = str(error)
        key = "search.params: searcher.*" if " has no setting " in message else "search.searcher"
        raise ConfigError(
            message if message.startswith("search.") else f"{key}: {message}"
        ) from None


# ---- measurements other than loss and bytes ------------------------------------------------------


def check_extras(config: SearchConfig, model: Checkpoint) -> None:
    """Raise ConfigError for prompts and context lengths that the promotion cannot measure.

    Prompts and contexts that the model does not take, or that have too little held-out text.
    """
    section = config.promotion
    if not (section.enabled and (section.prompts or section.context_lengths)):
        return
    try:
        if section.prompts:
            encode_prompts(
                section.prompts, checkpoints.load_tokenizer(model), model.geometry.max_positions
            )
        if section.context_lengths:
            longest = context_lengths(
                ",".join(map(str, section.context_lengths)), model.geometry.max_positions
            )[-1]
            check_words(checkpoints.load_tokenizer(model))
            length = config.data.sequence_length
            needed = NUM_TEXTS * longest
            there = config.data.eval.tokens // length * length
            if needed > there:
                enough = math.ceil(needed / length) * length
                raise ConfigError(
                    f"context_lengths: {longest} take {needed} held-out tokens, and there are "
                    f"{there} in whole sequences; set data.eval.tokens to {enough}, or choose a "
                    "shorter context"
                )
    except ConfigError as error:
        raise ConfigError(f"promotion.{error}") from None


def check_tasks(config: SearchConfig, model: Checkpoint) -> None:
    """Raise ConfigError for tasks of the promotion that its gate cannot run or compare."""
    section = config.promotion
    if not (section.enabled and section.tasks):
        return
    try:
        tokenizer = checkpoints.load_tokenizer(model)
        metrics = HarnessTasks(section.tasks, tokenizer, section.context_lengths or ()).metrics
    except ConfigError as error:
        raise ConfigError(f"promotion.{error}") from None
    if section.max_task_drop is not None and (
        without := [n for n, m in metrics.items() if not accuracies_of(m)]
    ):
        raise ConfigError(
            f"promotion.max_task_drop: task {without[0]!r} has no accuracy "
            f"({', '.join(ACCURACIES)}), but {', '.join(metrics[without[0]])}; leave it out of "
            "promotion.tasks, or max_task_drop"
        )


def check_decode_time(config: SearchConfig, geometry: HeadGeometry) -> None:
    """Raise ConfigError where no engine can be timed at `search.decode_context_length`."""
    length, name = config.search.decode_context_length, config.search.target
    if length is None:
        return
    key = f"search.decode_context_length: got {length}"
    if name == "any":
        raise ConfigError(
            f"{key} with search.target any: which engine? set search.target, e.g. to llama.cpp"
        )
    if not TOKENS < length <= geometry.max_positions:
        raise ConfigError(
            f"{key}, expected more than the {TOKENS} tokens that are decoded, and at most the "
            f"{geometry.max_positions} positions of {config.model.path!r}"
        )
    try:
        engine(target(name).engines[0]).find(None)
    except EngineError as error:
        raise ConfigError(f"{key}: {error}") from None
