"""Peak disk usage of a search, from its configuration and the checkpoint's config.json.

A sum over the files that a search writes, by what removes them (`trainers.jobs.checkpoints`,
`orchestrator.search.leftovers`). Where their number is not known, it is the largest that there can
be.

Legend: w weights of one model in the search's dtype, t in that of training, s a training checkpoint
(trained weights, a float32 copy of them and Adam's two moments).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from attention.base.text import gib
from attention.calibration.sizes import FREE_SHARE, Mixed, layer_bytes, most_exact
from attention.io.precision import DTYPES
from orchestrator.config.schema import SearchConfig, TextSection
from orchestrator.resources.size import SearchInputs, Size, trained_parameters
from orchestrator.storage.mirror import is_remote
from orchestrator.storage.paths import disk_free, storage_path
from trainers.deepspeed_config import bytes_per_trained
from trainers.jobs.checkpoints import KEEP
from trainers.settings import TrainSettings

BESIDE = 20 * 2**20  # bytes of a hub model's other files: a tokenizer
# Journal, plans, logs, MLflow: per trial, and for the search itself
RECORDS = 2**20
OWN_RECORDS = 32 * 2**20


@dataclass(frozen=True)
class Disk:
    """Bytes on disk.

    Attributes:
        parts: By what they are of, each at its own peak: token sets; the original model's
            statistics; converted weights of all trials; weights of their last and best steps;
            training checkpoints, while as many train or wait as can; promotions (weights,
            checkpoints, exports); the rest.
        most: Of all at the same time.
        kept: In the end.
    """

    parts: dict[str, int]
    most: int
    kept: int


@dataclass(frozen=True)
class Storage:
    """The folders and the bytes that a search will write.

    Attributes:
        trials: Number of trials that are converted.
        trainings: Number of trainings of its promotion.
        folder: The storage.
        free: Bytes that are free there.
        mixed: How the mixed moments of the original model's statistics are stored.
        statistics: Bytes of these statistics.
    """

    inputs: SearchInputs
    trials: int
    trainings: int
    folder: Path
    free: int
    mixed: Mixed
    statistics: int

    @classmethod
    def of(
        cls, inputs: SearchInputs, trials: int, trainings: int, folder: Path | None = None
    ) -> Storage:
        """Return the need of a search, or of a part of it.

        Args:
            folder: Where it writes; None for the configuration's.
        """
        folder = folder or storage_path(inputs.config.storage)
        free = disk_free(folder)
        tokens = inputs.config.data.calibration.tokens
        geometry, length = inputs.geometry, inputs.config.data.sequence_length
        mixed = most_exact(geometry, tokens, FREE_SHARE * free, length)
        return cls(
            inputs=inputs,
            trials=max(1, trials),
            trainings=trainings,
            folder=folder,
            free=free,
            mixed=mixed,
            statistics=geometry.num_layers * layer_bytes(geometry, tokens, mixed, length),
        )

    @property
    def config(self) -> SearchConfig:
        return self.inputs.config

    def disk(self, parallel: int) -> Disk:
        """Return what the search takes with `parallel` trials at a time."""
        config = self.config
        inputs = self.inputs
        trials = self.trials
        model = inputs.model
        parameters = inputs.size.total
        rungs = len(config.rungs.steps) - 1
        most, relaxing = KEEP + 1, _relaxing(inputs)  # one more while it is written
        other_files = _other_files(config.model.path)
        w = parameters * inputs.written.itemsize + other_files
        t = parameters * DTYPES[config.train.dtype].itemsize + other_files
        s = 0 if is_remote(config.storage) else self.trial_checkpoint_bytes
        texts = sum(section.tokens for section in _texts(config)) * (
            2 if model.vocab_size <= 2**16 else 4
        )
        records, converted = OWN_RECORDS + trials * RECORDS, trials * w
        trained = checkpoints = finalists = going = removed = 0
        if rungs:
            running = min(parallel, trials)
            paused = min(_paused(config, trials, relaxing), trials - running)
            finalists = min(_finalists(inputs), trials)
            few = config.promotion.keep_weights == "finalists"
            # Weights of how many trials there are at a time, and in the end
            holding = min(trials, running + paused + finalists) if few else trials
            left = finalists if few else trials
            # Of each its last and its best weights, and what its relaxation has come to
            each = 1 + (rungs > 1)
            trained = holding * t * each + min(relaxing, holding) * t
            # In the search's library for trials to come, maybe after the trials that had them
            stored = _carried(inputs) + _ahead(config)
            conversions = min(trials, holding + stored)
            converted = conversions * w
            removed = (conversions - left) * w + (holding - left) * t * each
            removed += max(0, min(relaxing, holding) - left) * t
            removed += left * t * (each - 1) * few
            # Between two rungs there are some too, by the clock
            checkpoints = running * most + paused * KEEP + min(finalists, trials - running - paused)
            # Best weights of steps before, and stages of relaxations
            going = (running + paused) * t * max(0, min(most, rungs - 1) - 1)
            stages = w + lifted_bytes(inputs) + t * _stages(inputs)
            going += min(relaxing, running + paused) * stages
            going += min(relaxing, stored) * (w + lifted_bytes(inputs))
        shipped, promoting = self._promotion(parallel, w, other_files)
        shared = texts + self.statistics + records + converted + trained
        remaining = shared - removed + finalists * s + shipped
        predictions = _teacher_logits(config, model.vocab_size)
        shared += predictions
        remaining += predictions
        parts = {
            "texts": texts,
            **({"teacher_logits": predictions} if predictions else {}),
            "statistics": self.statistics,
            "converted": converted,
            "trained": trained + going,
            "checkpoints": checkpoints * s,
            "promotion": promoting + shipped,
            "records": records,
        }
        return Disk(parts, max(shared + checkpoints * s + going, remaining + promoting), remaining)

    def shortage(self, parallel: int) -> str | None:
        """Return the message for a search that cannot fit, with a remedy; None where it can."""
        takes, free = self.disk(parallel), self.free
        if takes.most <= free:
            return None
        parts = ", ".join(f"{name} {gib(value)}" for name, value in takes.parts.items() if value)
        fewer = next((n for n in range(parallel - 1, 0, -1) if self.disk(n).most <= free), None)
        others = (
            "fewer trials (search.num_samples, recipes, kv_ratios, learning_rates), promotion.top"
        )
        if self.config.train.tuning == "full":
            others += ", train.tuning=lora"
        remedy = (
            f"resources.max_concurrent={fewer} would do"
            if fewer
            else f"what makes it less: {others}"
        )
        return (
            f"the search takes up to {gib(takes.most)} of {self.folder}, and {gib(free)} are free "
            f"there ({parts}); free {gib(takes.most - free)} more or give another storage; {remedy}"
        )

    @property
    def trial_checkpoint_bytes(self) -> int:
        """Return the bytes of a trial's training checkpoint; 0 where none trains."""
        inputs = self.inputs
        if len(self.config.rungs.steps) == 1:
            return 0
        whole = bool(_relaxing(inputs))
        return max(
            checkpoint_bytes(inputs.model, inputs.size, each, whole=whole)
            for each in inputs.trainings(self.config.train)
        )

    def _promotion(self, parallel: int, w: int, other_files: int) -> tuple[int, int]:
        """Return the bytes that remain of a promotion, and the additional ones while it trains."""
        section, train = self.config.promotion, self.config.promotion_train
        if not section.enabled:
            return 0, 0
        t = self.inputs.size.total * DTYPES[train.dtype].itemsize + other_files
        remote = is_remote(self.config.storage)
        s = 0 if remote else checkpoint_bytes(self.inputs.model, self.inputs.size, train)
        evaluations, running = section.evaluations, min(parallel, self.trainings)
        shipped = self.trainings * t * (1 + (evaluations > 1)) + max(1, self.trainings) * w
        return shipped, running * ((KEEP + 1) * s + max(0, min(KEEP + 1, evaluations - 1) - 1) * t)


def checkpoint_bytes(
    model: PretrainedConfig, size: Size, train: TrainSettings, *, whole: bool = False
) -> int:
    """Return the bytes of one training checkpoint, which holds what is trained.

    Args:
        whole: Whether all weights are trained, whatever the settings say.
    """
    trained = size.total if whole else trained_parameters(model, size, train)
    return trained * bytes_per_trained(train)


def lifted_bytes(inputs: SearchInputs) -> int:
    """Return by how much the start of a relaxation is larger than the model.

    In it every query head has a separate key and value head.
    """
    g = inputs.geometry
    more = 2 * g.num_layers * (g.num_heads - g.num_kv_heads) * g.head_dim * (g.hidden_size + 1)
    return more * inputs.written.itemsize


def _carried(inputs: SearchInputs) -> int:
    """Return the most conversions at a time that trials before and trials to come have in common.

    In the order of the named candidates, in which those of each seed are adjacent.
    """
    keys = [
        json.dumps([candidate.recipe.conversion_choices, candidate.used_ratio], sort_keys=True)
        for candidate in inputs.candidates
    ]
    last = {key: index for index, key in enumerate(keys)}
    most = 0
    begun: set[str] = set()
    for index, key in enumerate(keys):
        begun.add(key)
        most = max(most, sum(last[other] > index for other in begun))
    return most * len(inputs.config.seeds)


def _ahead(config: SearchConfig) -> int:
    """Return the number of conversions that are made ahead of their trials."""
    return config.resources.plan_ahead if config.resources.trial_gpus else 0


def _finalists(inputs: SearchInputs) -> int:
    """Return the number of trials whose training checkpoint stays.

    These are the candidates of a promotion, and a baseline at each KV ratio.
    """
    ratios = {candidate.kv_ratio for candidate in inputs.candidates}
    return len(ratios) + most_promoted(inputs, ratios)


def most_promoted(inputs: SearchInputs, ratios: Collection[float]) -> int:
    """Return how many candidates a promotion takes at most.

    Args:
        ratios: The KV ratios of the trials.
    """
    promotion = inputs.config.promotion
    if promotion.select != "front":
        return len(ratios) * promotion.top
    if len(inputs.config.objectives) > 2 or inputs.config.search.num_samples:
        return len(inputs.candidates) + inputs.config.search.num_samples
    # One of each size, which a recipe may not use up to its KV ratio
    return len({candidate.used_ratio for candidate in inputs.candidates})


def _paused(config: SearchConfig, trials: int, relaxing: int) -> int:
    """Return how many trials with training checkpoints can be paused at a rung above the first.

    These are the trials that were let into it, and those that cannot stop before, as their
    relaxation trains through it.
    """
    if not config.rungs.stop or config.rungs.scheduler != "front" or len(config.rungs.steps) < 3:
        return 0
    return min(trials, max(1, math.floor(trials / config.rungs.reduction_factor)) + relaxing)


def _relaxing(inputs: SearchInputs) -> int:
    """Trials that fuse while they train, at most."""
    section = inputs.config.search
    drawn = any(choice != "none" for choice in section.search_space.get("relaxation", ()))
    return (
        sum(c.recipe.relaxation != "none" for c in inputs.candidates) + drawn * section.num_samples
    )


def _stages(inputs: SearchInputs) -> int:
    """Stages of a relaxation before the last one, at most."""
    recipes = [c.recipe for c in inputs.candidates if c.recipe.relaxation != "none"]
    halving = any(recipe.knobs("relaxation").get("halving") for recipe in recipes)
    return math.ceil(math.log2(inputs.geometry.num_heads)) if halving else 0


def _texts(config: SearchConfig) -> list[TextSection]:
    data = config.data
    return [
        data.train,
        data.eval,
        data.test or data.eval,
        data.calibration,
        *([config.promotion.data] if config.promotion.data else []),
    ]


def _teacher_logits(config: SearchConfig, vocabulary: int) -> int:
    """Return the bytes of the original's predictions that trainings keep of their texts."""
    section = config.promotion
    texts: list[tuple[TextSection, TrainSettings]] = [(config.data.train, config.train)]
    if section.enabled and section.steps:
        texts.append((section.data or config.data.train, config.promotion_train))
    stored = {
        (text.source, text.tokens, train.teacher_logits_k, train.dtype)
        for text, train in texts
        if train.keeps_teacher_logits
    }
    index = 2 if vocabulary <= 2**16 else 4
    return sum(
        tokens * (min(k, vocabulary) * (index + (4 if dtype == "float32" else 2)) + 4)
        for _, tokens, k, dtype in stored
    )


def _other_files(path: str) -> int:
    """Return the bytes besides the weights in a checkpoint that is made of the one at `path`."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return BESIDE
    files = [
        p
        for p in folder.iterdir()
        if p.is_file() and p.suffix not in (".safetensors", ".bin", ".pt", ".gguf")
    ]
    return sum(p.stat().st_size for p in files)
