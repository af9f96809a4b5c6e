"""The bytes that a search has on disk when it has most, from its configuration and the checkpoint's config.json.

A sum over the files that a search keeps, by what removes them (`trainers.jobs.checkpoints`,
`orchestrator.search.leftovers`). Where it is not known how many there will be, it is the most that there can be.

Legend: w weights of one model in the search's dtype, t in that of training, s a training checkpoint (of what is trained
weights, a float32 copy and Adam's two moments).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from attention.calibration.sizes import Mixed, layer_bytes, most_exact
from attention.checkpoint import Checkpoint
from attention.families import geometry_of
from attention.io.precision import DTYPES
from orchestrator.checkpoints import written_dtype
from orchestrator.config.schema import SearchConfig, TextSection
from orchestrator.conversion.calibrating import FREE_SHARE
from orchestrator.conversion.estimates.sizes import Size
from orchestrator.search.searchers import SearchProblem
from orchestrator.storage.mirror import is_remote
from orchestrator.storage.paths import disk_free, storage_path
from trainers.freezing import key_value_parameters
from trainers.jobs.checkpoints import KEEP
from trainers.settings import TrainSettings

ADAM = 12  # bytes a trained parameter besides the weights: a float32 copy and two moments
BESIDE = 20 * 2**20  # of files beside a hub model's weights: a tokenizer
RECORDS, OWN_RECORDS = 2**20, 32 * 2**20  # journal, plans, logs, MLflow: of a trial, and of the search itself


@dataclass(frozen=True)
class Disk:
    """Bytes. `parts`, each at its own most: token sets; the original model's statistics; converted weights of all
    trials; weights of their last and best steps; training checkpoints, while as many train or wait as can; promotions
    (weights, checkpoints, exports); the rest. `most`: of all at a time; `kept`: in the end."""

    parts: dict[str, int]
    most: int
    kept: int


@dataclass(frozen=True)
class Storage:
    """Where a search will write, and how much: `trials` that are converted, `trainings` of its promotion. `mixed`: how
    the original model's statistics are kept, `statistics`: their bytes."""

    config: SearchConfig
    model: PretrainedConfig
    size: Size
    problem: SearchProblem
    trials: int
    trainings: int
    folder: Path
    free: int
    mixed: Mixed
    statistics: int

    @classmethod
    def of(
        cls, config: SearchConfig, problem: SearchProblem, trials: int, trainings: int, folder: Path | None = None
    ) -> Storage:
        """`folder`: None for the configuration's."""
        folder, model = folder or storage_path(config.storage), Checkpoint.open(config.model.path).config
        free, tokens = disk_free(folder), config.data.calibration.tokens
        geometry = geometry_of(model)
        mixed = most_exact(geometry, tokens, FREE_SHARE * free)
        statistics = geometry.num_layers * layer_bytes(geometry, tokens, mixed)
        return cls(config, model, Size.of(model), problem, max(1, trials), trainings, folder, free, mixed, statistics)

    def disk(self, parallel: int) -> Disk:
        """What the search takes with so many trials at a time."""
        config, model, trials, rungs = self.config, self.model, self.trials, len(self.config.rungs.steps) - 1
        most, relaxing = KEEP + 1, _relaxing(config, self.problem)  # one more while it is written
        beside = _beside(config.model.path)
        w = self.size.total * DTYPES[written_dtype(config.model.path, config.model.dtype)].itemsize + beside
        t = self.size.total * DTYPES[config.train.dtype].itemsize + beside
        s = max(self._checkpoint(each, whole=bool(relaxing)) for each in self.problem.trainings(self.config.train))
        texts = sum(section.tokens for section in _texts(config)) * (2 if model.vocab_size <= 2**16 else 4)
        records, converted = OWN_RECORDS + trials * RECORDS, trials * w
        trained = checkpoints = finalists = going = gone = 0
        if rungs:
            running = min(parallel, trials)
            paused = min(_paused(config, trials, relaxing), trials - running)
            finalists = min(_finalists(config, self.problem), trials)
            few = config.promotion.keep_weights == "finalists"
            # Weights of how many trials there are at a time, and in the end
            holding = min(trials, running + paused + finalists) if few else trials
            left = finalists if few else trials
            # Of each its last and its best weights, and what its relaxation has come to
            each = 1 + (rungs > 1)
            trained = holding * t * each + min(relaxing, holding) * t
            converted = holding * w
            gone = (holding - left) * (w + t * each) + max(0, min(relaxing, holding) - left) * t
            gone += left * t * (each - 1) * few
            written = most if relaxing else min(most, rungs)
            checkpoints = running * written + paused * min(KEEP, rungs) + min(finalists, trials - running - paused)
            # Best weights of steps before, and stages of relaxations
            going = (running + paused) * t * max(0, min(most, rungs - 1) - 1)
            stages = w + lifted_bytes(config, model) + t * _stages(self.problem, model)
            going += min(relaxing, running + paused) * stages
        shipped, promoting = self._promotion(parallel, w, beside)
        shared = texts + self.statistics + records + converted + trained
        kept = shared - gone + finalists * s + shipped
        parts = {
            "texts": texts,
            "statistics": self.statistics,
            "converted": converted,
            "trained": trained + going,
            "checkpoints": checkpoints * s,
            "promotion": promoting + shipped,
            "records": records,
        }
        return Disk(parts, max(shared + checkpoints * s + going, kept + promoting), kept)

    def shortage(self, parallel: int) -> str | None:
        """What to say where a search cannot fit: the numbers, and what helps. None where it can."""
        takes, free = self.disk(parallel), self.free
        if takes.most <= free:
            return None
        parts = ", ".join(f"{name} {giga(value)}" for name, value in takes.parts.items() if value)
        fewer = next((n for n in range(parallel - 1, 0, -1) if self.disk(n).most <= free), None)
        others = "fewer trials (search.num_samples, recipes, kv_ratios, learning_rates), promotion.top"
        if self.config.train.tuning == "full":
            others += ", train.tuning=lora"
        remedy = f"resources.max_concurrent={fewer} would do" if fewer else f"what makes it less: {others}"
        return (
            f"the search takes up to {giga(takes.most)} of {self.folder}, and {giga(free)} are free there ({parts}); "
            f"free {giga(takes.most - free)} more or give another storage; {remedy}"
        )

    def _checkpoint(self, train: TrainSettings, *, whole: bool = False) -> int:
        """Bytes of a training checkpoint in this folder: none where workers send it to an address themselves."""
        remote = is_remote(self.config.storage)
        return 0 if remote else checkpoint_bytes(self.model, self.size, train, whole=whole)

    def _promotion(self, parallel: int, w: int, beside: int) -> tuple[int, int]:
        """Bytes that stay of a promotion, and those that it has besides while it trains."""
        section, train = self.config.promotion, self.config.promotion_train
        if not section.enabled:
            return 0, 0
        t, s = self.size.total * DTYPES[train.dtype].itemsize + beside, self._checkpoint(train)
        evaluations, running = section.evaluations, min(parallel, self.trainings)
        shipped = self.trainings * t * (1 + (evaluations > 1)) + max(1, self.trainings) * w
        return shipped, running * ((KEEP + 1) * s + max(0, min(KEEP + 1, evaluations - 1) - 1) * t)


def giga(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def checkpoint_bytes(model: PretrainedConfig, size: Size, train: TrainSettings, *, whole: bool = False) -> int:
    """Of one training checkpoint, which holds what is trained; `whole`: of a training of all weights, whatever the
    settings say."""
    g, tuned = geometry_of(model), size.total
    if train.tuning == "lora" and not whole:
        inner = int(getattr(model, "intermediate_size", None) or getattr(model, "ffn_dim", 0) or 4 * g.hidden_size)
        widths = 4 * (g.hidden_size + g.num_heads * g.head_dim) + 3 * (g.hidden_size + inner)
        tuned = min(size.total, g.num_layers * train.lora_rank * widths)
    if train.tuning == "kv" and not whole:
        tuned = key_value_parameters(g)
    return tuned * (DTYPES[train.dtype].itemsize + ADAM)


def lifted_bytes(config: SearchConfig, model: PretrainedConfig) -> int:
    """By how much the start of a relaxation, in which every query head has a key and a value head, is larger."""
    g = geometry_of(model)
    more = 2 * g.num_layers * (g.num_heads - g.num_kv_heads) * g.head_dim * (g.hidden_size + 1)
    return more * DTYPES[written_dtype(config.model.path, config.model.dtype)].itemsize


def _finalists(config: SearchConfig, problem: SearchProblem) -> int:
    """Trials whose training checkpoint stays: candidates of a promotion, and a baseline, at each KV ratio."""
    ratios = len({candidate.kv_ratio for candidate in problem.named})
    return ratios * (1 + (1 if config.promotion.select == "front" else config.promotion.top))


def _paused(config: SearchConfig, trials: int, relaxing: int) -> int:
    """Trials that can wait behind a rung above the first, with training checkpoints: those that were let into it, and
    those that nothing holds before, as their relaxation trains through it."""
    if not config.rungs.stop or config.rungs.scheduler != "front" or len(config.rungs.steps) < 3:
        return 0
    return min(trials, max(1, math.floor(trials / config.rungs.reduction_factor)) + relaxing)


def _relaxing(config: SearchConfig, problem: SearchProblem) -> int:
    """Trials that fuse while they train, at most."""
    drawn = any(choice != "none" for choice in config.search.search_space.get("relaxation", ()))
    return sum(c.recipe.relaxation != "none" for c in problem.named) + drawn * problem.samples


def _stages(problem: SearchProblem, model: PretrainedConfig) -> int:
    """Stages of a relaxation before the last one, at most."""
    halving = any(c.recipe.relaxation != "none" and c.recipe.knobs("relaxation").get("halving") for c in problem.named)
    return math.ceil(math.log2(geometry_of(model).num_heads)) if halving else 0


def _texts(config: SearchConfig) -> list[TextSection]:
    data = config.data
    return [data.train, data.eval, data.calibration, *([config.promotion.data] if config.promotion.data else [])]


def _beside(path: str) -> int:
    """Bytes beside the weights in a checkpoint that is made of the one at `path`."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return BESIDE
    files = [p for p in folder.iterdir() if p.is_file() and p.suffix not in (".safetensors", ".bin", ".pt", ".gguf")]
    return sum(p.stat().st_size for p in files)
