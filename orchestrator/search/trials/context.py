"""The input that the steps and trials of a search share, and the training job of each trial."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from attention.calibration.sizes import Mixed
from attention.calibration.store import Calibration
from attention.checkpoint import Checkpoint
from attention.conversion.relaxation_knobs import too_few_steps
from attention.io.targets import target
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.config.schema import DECODE, PER_GPU, SearchConfig
from orchestrator.conversion import dha_distances
from orchestrator.conversion.calibration import checkpoint_calibration
from orchestrator.resources.processes import TRAINING_WORKER
from orchestrator.search.candidates import Candidate
from orchestrator.serving.decode_times import DecodeTimes
from orchestrator.storage.lock import SearchLock
from orchestrator.storage.mirror import Mirror
from orchestrator.storage.paths import SearchFolder
from orchestrator.tracking.sync import MlflowSync
from search_spaces.recipes.recipe import Recipe
from search_spaces.relaxation.stages import SETUP_KNOBS
from trainers.jobs.train_job import TrainJob
from trainers.relaxations.base import is_coarser
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import AUTO_STRATEGY, Strategy, TrainSettings


@dataclass(frozen=True)
class TrialContext:
    """The input of all trials of a search: plain values, absolute paths visible to every node.

    Attributes:
        dtype: Dtype in which models are written and bytes are counted.
        promotion_file: The promotion's own training text.
        test_file: The gate's own text; None if there was too little text.
        weights: Digest of the original model's.
        mixed_moments: Storage format of its statistics.
        pool: Name of the worker pool; None: every training starts its own workers.
        accelerator_type: Accelerator type of the workers.
        checkpoint_minutes: Longest time between checkpoints of a training.
        checkpoint_address: Address of training checkpoints, if storage is an address.
        decode_times: Decode times of the target engine, if decode time is an objective.
        target: Export target of that engine, or `any`.
        tensor_parallel: GPUs among which it divides the heads.
        recomputation: What `train.activation_checkpointing: auto` selects for each process.
        task: `ray.remote` options of the task that plans for a trial that trains; None: the
            trial's own process plans.
    """

    folder: str
    model: str
    dtype: str
    train_file: str
    eval_file: str
    calibration_file: str
    calibration_cache: str
    rungs: tuple[int, ...]
    train: Mapping[str, Any] = field(hash=False)
    original_loss: float
    device: str = "cpu"
    teacher: str | None = None
    promotion_file: str | None = None
    test_file: str | None = None
    weights: str | None = None
    mixed_moments: Mixed | None = None
    pool: str | None = None
    accelerator_type: str | None = None
    checkpoint_address: str | None = None
    placement_strategy: Strategy = AUTO_STRATEGY
    decode_times: DecodeTimes | None = None
    target: str = "any"
    tensor_parallel: int = 1
    task: Mapping[str, Any] | None = field(default=None, hash=False)
    recomputation: Mapping[str, bool | str] = field(default_factory=dict, hash=False)
    checkpoint_minutes: float | None = None

    def calibration(self, tokens: Tensor) -> Calibration:
        """Return the original model's statistics over calibration `tokens` `[N, T]`.

        They are stored in the search's cache.
        """
        return checkpoint_calibration(
            self.model,
            tokens,
            self.calibration_cache,
            dtype=self.dtype,
            device=self.device,
            weights=self.weights,
            mixed=self.mixed_moments,
        )

    def search_phase(self, candidate: Candidate) -> dha_distances.SearchPhase | None:
        """Return DHA's search phase that a candidate's plan is based on; None if it needs none."""
        settings = TrainSettings.model_validate(self.train)
        resolved = self.recomputing(settings, TRAINING_WORKER)
        return dha_distances.SearchPhase.of(
            candidate.recipe, self.model, self.train_file, settings, candidate.seed, resolved
        )

    def settings(self, recipe: Recipe, learning_rate: float) -> TrainSettings:
        """Return the training settings of the search with the changes of the recipe's recovery."""
        settings = TrainSettings.model_validate(
            {**self.train, **recipe.apply("recovery"), "learning_rate": learning_rate}
        )
        return self.recomputing(settings, TRAINING_WORKER)

    def recomputing(self, settings: TrainSettings, process: str) -> TrainSettings:
        """Return settings in which `activation_checkpointing: auto` is resolved."""
        if settings.activation_checkpointing != "auto":
            return settings
        # That of trials for a promotion that the search did not foresee
        choice = self.recomputation.get(process, self.recomputation.get(TRAINING_WORKER, False))
        return settings.model_copy(update={"activation_checkpointing": choice})

    def relaxation_steps(self, recipe: Recipe) -> int:
        """Return the steps of a trial's relaxation, by the function of that name."""
        return relaxation_steps(recipe, self.rungs)

    def job(
        self,
        name: str,
        model_dir: Path,
        out_dir: Path,
        candidate: Candidate,
        milestones: Sequence[int],
        relaxation: RelaxationSpec | None = None,
    ) -> TrainJob:
        """Return the training of a candidate's weights up to some steps."""
        return TrainJob(
            model_dir=str(model_dir),
            teacher_dir=self.teacher or self.model,
            train_file=self.train_file,
            eval_file=self.eval_file,
            out_dir=str(out_dir),
            storage_path=str(Path(self.folder) / "train"),
            run_name=name,
            milestones=tuple(milestones),
            settings=self.settings(candidate.recipe, candidate.learning_rate),
            seed=candidate.seed,
            keep_best=True,
            relaxation=relaxation,
            accelerator_type=self.accelerator_type,
            placement_strategy=self.placement_strategy,
            checkpoint_address=self.checkpoint_address,
            checkpoint_minutes=self.checkpoint_minutes,
        )

    def engine_facts(self, config: Any, plan: AttentionPlan) -> dict[str, float]:
        """Return what the engine makes of a plan, where that is an objective.

        That is the decode time, and the bytes of a token on each of several GPUs.

        Args:
            config: Of the original model.
            plan: Of the trial.

        Raises:
            RankLayoutError: For heads that the GPUs cannot divide.
        """
        if (times := self.decode_times) is None and self.tensor_parallel == 1:
            return {}
        support = target(self.target).support_for(config, plan)
        facts = {} if times is None else {DECODE: times.of(support)}
        if self.tensor_parallel > 1:
            on_rank = support.on_rank(self.tensor_parallel, plan.num_heads)
            facts[PER_GPU] = on_rank.bytes_per_token(self.dtype)
        return facts

    def relaxation(
        self, recipe: Recipe, folder: Path, settings: TrainSettings | None = None
    ) -> RelaxationSpec | None:
        """Return the relaxation of the trial in `folder`; None if its recipe has none."""
        steps = self.relaxation_steps(recipe)
        if not steps:
            return None
        kv_map = None
        if recipe.knobs("relaxation").get("halving"):
            kv_map = Checkpoint.open(self.model).geometry.kv_map
        plan = (folder / "plan.json").read_text("utf-8")
        return relaxation_spec(recipe, plan, steps, settings, kv_map)


@dataclass(frozen=True)
class SearchControl:
    """Calls that a driver makes before it writes a record of a search, or reads a trial's weights.

    Attributes:
        check: Raises ConfigError once another driver has taken over the search, or the storage's
            address.
        fetch: Fetches files of trials, by id, that are only at the address.
        promoting: Set while the models of a promotion are trained.
    """

    check: Callable[[], None] = lambda: None
    fetch: Callable[[Collection[str]], object] = lambda trials: None
    promoting: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, folder: SearchFolder, lock: SearchLock, mirror: Mirror | None) -> SearchControl:
        """Return the control of a search whose lock is taken."""
        if mirror is None:
            return cls(lock.check)

        def check() -> None:
            lock.check()
            mirror.check()

        return cls(check, partial(mirror.fetch_search, folder.root.name))


@dataclass(frozen=True)
class SearchSession:
    """The input that the steps of a search, or of a promotion from it, share.

    Attributes:
        parallel: Trials at a time.
        control: The lock, and the copy at an address.
    """

    config: SearchConfig
    folder: SearchFolder
    context: TrialContext
    mlflow: MlflowSync
    parallel: int
    control: SearchControl = field(default_factory=lambda: SearchControl())


def relaxation_steps(recipe: Recipe, rungs: Sequence[int]) -> int:
    """Return the training steps of a trial that its relaxation takes; 0 without one.

    They are part of the steps up to the last rung. Only a fraction of 1 takes all, which leaves no
    recovery.
    """
    if recipe.relaxation == "none" or len(rungs) == 1:
        return 0
    total, knobs = rungs[-1], recipe.knobs("relaxation")
    if steps := knobs.get("steps"):
        if steps >= total:
            raise ValueError(f"relaxation.steps must be below the last rung {total}, got {steps}")
        return steps
    fraction = knobs["fraction"]
    return total if fraction == 1 else min(total - 1, max(1, round(fraction * total)))


def relaxation_changes(knobs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the training settings that a relaxation with these knobs changes for its steps."""
    changes = {name: knobs[name] for name in ("batch_size", "learning_rate") if knobs.get(name)}
    return changes | {"tuning": "full"} if changes else {}


def relaxation_sequences(recipe: Recipe, rungs: Sequence[int], batch_size: int) -> int:
    """Return the number of sequences that a trial reads beyond those of one without a relaxation.

    Args:
        recipe: Of the trial.
        rungs: Steps of the rungs.
        batch_size: Of the training.
    """
    if not (steps := relaxation_steps(recipe, rungs)):
        return 0
    return steps * ((recipe.knobs("relaxation").get("batch_size") or batch_size) - batch_size)


def unfinished_relaxations(recipes: Iterable[Recipe], rungs: Sequence[int]) -> list[str]:
    """Return cause and remedy for each recipe whose relaxation cannot end by the last rung."""
    foreseen = []
    for recipe in dict.fromkeys(recipes):
        if steps := relaxation_steps(recipe, rungs):
            why = too_few_steps(recipe.relaxation, recipe.knobs("relaxation"), steps)
            if why is not None:
                foreseen.append(
                    f"{recipe.name}: {why}; raise rungs.steps, or set relaxation.rate higher or to "
                    "auto"
                )
    return foreseen


def training_job(
    context: TrialContext, folder: Path, candidate: Candidate, trial_id: str
) -> TrainJob:
    """Return the brief fine-tuning of a trial: from its converted checkpoint through the rungs.

    With a relaxation it starts from the unfused heads, and the rungs within it are left out: until
    it has collapsed, by the last rung, there is no model to measure.
    """
    settings = context.settings(candidate.recipe, candidate.learning_rate)
    spec = context.relaxation(candidate.recipe, folder, settings)
    before = spec.total_steps if spec else 0
    milestones = [rung - before for rung in context.rungs[1:] if rung > before] or [0]
    model = folder / ("start" if spec else "converted")
    return context.job(trial_id, model, folder / "trained", candidate, milestones, relaxation=spec)


def relaxation_spec(
    recipe: Recipe,
    plan: str,
    steps: int,
    settings: TrainSettings | None = None,
    kv_map: Sequence[int] | None = None,
) -> RelaxationSpec:
    """Return the relaxation of a recipe towards a plan, its steps shared evenly by its stages.

    Args:
        plan: As JSON.
        steps: At most, and at least 1; first stages that would have none are left out.
        settings: Of the trial's training, of which the recipe may change batch and rate for the
            relaxation.
        kv_map: Of the checkpoint; stages that would fuse no more than it does are left out.
    """
    plans = recipe.apply("relaxation", AttentionPlan.from_json(plan))
    if kv_map is not None:
        goal = plans[-1]
        layers = (LayerPlan(tuple(kv_map), tuple(kv_map)),) * goal.num_layers
        start = replace(goal, layers=layers)
        coarser = (p for p in plans[:-1] if p.layers != layers and is_coarser(start, p))
        plans = (*coarser, goal)
    plans = plans[-steps:]  # a stage takes a step at least
    knobs = recipe.knobs("relaxation")
    changed_settings = None
    if settings is not None and (changes := relaxation_changes(knobs)):
        changed_settings = TrainSettings.model_validate({**settings.model_dump(), **changes})
    return RelaxationSpec(
        recipe.relaxation,
        tuple(p.to_json() for p in plans),
        steps // len(plans),
        {name: value for name, value in knobs.items() if name not in SETUP_KNOBS},
        changed_settings,
        own_schedule=knobs.get("own_schedule", False),
        regroup_steps=knobs.get("regroup_steps", 0),
    )
