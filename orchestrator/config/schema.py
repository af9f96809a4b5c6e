"""One YAML file describes a search.

Unknown keys are refused; every error names path, value and what is allowed.

The sections lie here and in `orchestrator.config.sections`, but for `train`, which lies beside its
consumer (`trainers.settings.TrainSettings`). A docstring below a key is its meaning everywhere, in
the pages of docs/ as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from orchestrator.config.defaults import CHECKPOINT_MINUTES, DISTILLED_RATE
from orchestrator.config.parsing import ConfigError, apply_override, parse_section, read_sections
from orchestrator.config.sections import (
    ArmSection,
    DataSection,
    ModelSection,
    Name,
    RungsSection,
    SearchSection,
    Section,
    TextSection,
    distinct,
)
from trainers.settings import AUTO_STRATEGY, Shape, Strategy, TrainSettings

OBJECTIVES = ("loss", "kv_bytes_per_token")
"""What a search makes small, under the names of its reports; one that measures decode time has
DECODE too.
"""
DECODE = "decode_seconds_per_token"
PER_GPU = "kv_bytes_per_token_per_gpu"
"""In place of the bytes of the whole model where `search.tensor_parallel` is more than 1."""


class PlaceSection(Section):
    """Where the workers of a promotion run."""

    accelerator_type: str | None = Field(default=None, min_length=1)
    """As `resources.accelerator_type`; none: as that says."""
    placement_strategy: Strategy | None = None
    """As `resources.placement_strategy`; none: as that says."""


class PromotionSection(Section):
    """Which trials get the full training, how they are trained, and what they must pass.

    The learning rate has a schedule of its own, which warms up again. Of all that was measured of a
    trial, the untrained conversion included, the step of lowest held-out loss is shipped. The gate
    asks that this loss is below the baseline's (at its own best step of equally many) at the same
    KV ratio; KV bytes as planned; and the same logits of the exported checkpoint.
    """

    enabled: bool = True
    """With false a search ends with its front."""
    select: Literal["best_per_budget", "front"] = "best_per_budget"
    """The `top` best trials at each KV ratio, or every trial on the front."""
    top: PositiveInt = 1
    """How many at each KV ratio."""
    steps: int = Field(default=0, ge=0)
    """Training steps, added to those of the last rung."""
    keep_weights: Literal["all", "finalists"] = "all"
    """Whose weights stay when a trial has ended. all: those of every trial, converted, of its last
    and its best step, so that `headfold promote` can take any of them later. finalists: those of
    the trials alone that are promoted as configured here and of the baseline, converted and of
    the best step; a large model wants this.
    """
    evaluations: PositiveInt = 4
    """Measurements on the way, at each of which a checkpoint is kept."""
    train: dict[str, Any] = Field(default={})
    """Settings that differ from the trials' `train`, e.g. `{num_workers: 32, learning_rate: 1e-5}`.
    """
    data: TextSection | None = None
    """Fresh training text; none: that of the trials, read on."""
    resources: PlaceSection = PlaceSection()
    """Where its workers run."""
    checkpoint_steps: PositiveInt | None = None
    """Steps between two checkpoints, beside those of the measurements."""
    checkpoint_minutes: PositiveFloat | None = None
    """Minutes after which there is a checkpoint at the latest; none: those of `resources`."""
    margin: float = Field(default=0.0, ge=0)
    """By how many nats per token the loss must be below the baseline's, on `data.test`."""
    margin_standard_errors: float = Field(default=0.0, ge=0)
    """By how many standard errors of this difference besides, e.g. 2. The error is that of a
    bootstrap over documents, which both models share; with 0 it is reported and not required.
    """
    logit_tolerance: PositiveFloat | None = None
    """How far logits of the exported checkpoint may be from the trained model's; none: 8 times what
    another order of the sums changes in them in float32, which is measured.
    """
    tasks: Annotated[list[str], AfterValidator(distinct)] = Field(default=[])
    """Tasks of lm-evaluation-harness that are run on what is exported, on the original model and on
    the baseline: `demo`, folders of task files that every node sees, or the harness's own names.
    """
    max_task_drop: float | None = Field(default=None, ge=0, le=1)
    """The gate asks that no task's accuracy is lower than the original's by more; needs `tasks`."""
    prompts: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Texts that are continued by the same three models, side by side."""
    context_lengths: Annotated[list[PositiveInt], AfterValidator(distinct)] = Field(default=[])
    """Context lengths at which the loss by position and the recall of a hidden line are measured.
    """
    max_recall_drop: float | None = Field(default=None, ge=0, le=1)
    """The gate asks that recall falls by no more; needs `context_lengths`."""
    registered_name: Name | None = None
    """Name of the registered model in MLflow; none: that of the search."""

    @model_validator(mode="after")
    def _of_limits(self) -> PromotionSection:
        if self.max_task_drop is not None and not self.tasks:
            raise ValueError(
                f"max_task_drop {self.max_task_drop:g} needs tasks, got none; set tasks, e.g. "
                "[demo]"
            )
        if self.max_recall_drop is not None and not self.context_lengths:
            raise ValueError(
                f"max_recall_drop {self.max_recall_drop:g} needs context_lengths, got none; set "
                "them, e.g. [512]"
            )
        return self


class TrackingSection(Section):
    """Where MLflow keeps the runs."""

    uri: str | None = None
    """Any tracking URI; none: MLFLOW_TRACKING_URI of the environment, else a sqlite store in the
    storage folder.
    """
    experiment: str = Field(default="headfold", min_length=1)
    """Name of the experiment that the runs belong to."""


class ResourcesSection(Section):
    """How trials share the cluster."""

    max_concurrent: Literal["auto"] | PositiveInt = "auto"
    """Trials at a time; auto: what fits the nodes of the cluster one by one, also while it grows
    and shrinks.
    """
    trial_cpus: float = Field(default=0.05, gt=0)
    """CPUs of what plans, converts and measures the untrained model before a trial's workers start.
    """
    trial_gpus: float = Field(default=0.0, ge=0)
    """GPUs of the same: a whole number, or a part of one.

    It is then a task of its own, and they are free again while the workers train.
    """
    accelerator_type: str | None = Field(default=None, min_length=1)
    """Workers run on nodes with these GPUs alone, by Ray's name of them (A100, A10G, H100); none:
    on any node.
    """
    trial_accelerator_type: str | None = Field(default=None, min_length=1)
    """The same for planning and measuring; none: that of the workers."""
    plan_ahead: int = Field(default=1, ge=0, le=64)
    """Candidates to come that are planned and converted while trials before them plan or train, on
    GPUs that nobody needs meanwhile (with `trial_gpus` alone).

    Which trials there are and what they come to does not change: only candidates that come in any
    case, whatever is reported until then. 0: every trial plans for itself.
    """
    hold_nodes: bool = True
    """Nodes of workers that are there stay while trials to come need them, where an autoscaler
    would end them for being idle, as while a trial plans on other nodes.
    """
    placement_strategy: Strategy = AUTO_STRATEGY
    """How the workers of a training lie on nodes, in Ray's words: STRICT_PACK all on one node, PACK
    on few, SPREAD on many; auto: on one where a node of the cluster can hold them, else on few.
    """
    reuse_workers: Literal["auto"] | bool = "auto"
    """Workers take one training after another, so that a trial waits for no process to start.

    With false every training starts workers of its own; auto does so where workers have GPUs and
    the model a billion parameters or more.
    """
    checkpoint_minutes: PositiveFloat = CHECKPOINT_MINUTES
    """Minutes after which a training, that of a trial too, has a checkpoint at the latest, from
    which it continues when it has lost a machine.
    """
    idle_seconds: PositiveFloat = 300.0
    """Reused workers end after so many seconds without a training."""
    stall_minutes: PositiveFloat | None = 120.0
    """A search fails, and says what waits for what, after so many minutes in which nothing has
    moved while its own processes wait for each other and no node can be added; none: it waits on.
    """
    max_wait_hours: float = Field(default=4.0, ge=0)
    """A search fails, and says what was requested and what the cluster has, when no node has had
    room for something of it for so many hours; 0: it waits without limit.
    """
    tokens_per_second: PositiveFloat | None = None
    """What one worker trains on, for estimates; none: measured where it can be."""
    price_per_hour: PositiveFloat | None = None
    """Of a GPU, or of a CPU where workers have no GPU, in whatever money, for estimates and bills.
    """

    @model_validator(mode="after")
    def _asked_for(self) -> ResourcesSection:
        if self.trial_gpus > 1 and self.trial_gpus % 1:
            raise ValueError(
                f"trial_gpus must be a whole number, or a part of one GPU, got {self.trial_gpus:g}"
            )
        if self.trial_accelerator_type and not self.trial_gpus:
            raise ValueError(
                f"trial_accelerator_type {self.trial_accelerator_type!r} needs trial_gpus above 0, "
                "got 0: without GPUs plans are made wherever there is a CPU; set trial_gpus=1 or "
                "leave it out"
            )
        return self


class TrialTraining(TrainSettings):
    """How trials, and promotions of them, are trained: towards the original model's predictions."""

    learning_rate: Annotated[float, Field(gt=0)] = DISTILLED_RATE
    """Peak of the schedule: a linear warm-up, then a cosine."""
    distillation: Literal["none", "kl", "kl_bild"] = "kl"
    """What is learnt. kl: KL(original model ‖ model), kl_bild KL + BiLD (Jin 2024), none: language
    modelling alone, for which no original model is in memory."""
    distillation_weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of the distillation in the loss; the language-modelling loss keeps the rest."""


DEFAULTS_OF_TRIALS = ("learning_rate", "distillation", "distillation_weight")
"""The settings whose defaults are those of trials alone: a search that was begun when these were
others keeps them."""


class SearchConfig(Section):
    """A whole search."""

    name: Name
    """Of the search: its folder in the storage, its run in MLflow. 1 to 64 letters, digits, '.',
    '_' or '-'.
    """
    model: ModelSection
    data: DataSection = DataSection()
    search: SearchSection
    rungs: RungsSection = RungsSection()
    train: TrialTraining = TrialTraining()
    promotion: PromotionSection = PromotionSection()
    tracking: TrackingSection = TrackingSection()
    storage: str = Field(default="runs", min_length=1)
    """A folder that every node of the cluster sees, or an address (s3://bucket/path, gs://...) that
    is kept up to date with a working folder below HEADFOLD_HOME, which every node sees.
    """
    resources: ResourcesSection = ResourcesSection()

    @field_validator("train")
    @classmethod
    def _comparable(cls, train: TrialTraining) -> TrialTraining:
        if train.min_workers is not None:
            raise ValueError(
                f"num_workers: a range is for promotion.train, got [{train.min_workers}, "
                f"{train.num_workers}]: trials are compared, also by their speed; give one number"
            )
        return train

    @property
    def learning_rates(self) -> list[float]:
        return self.search.learning_rates or [self.train.learning_rate]

    def begun_as(self, stored: SearchConfig) -> SearchConfig:
        """Return this configuration with the defaults of `train` that a search was begun with.

        Args:
            stored: The configuration of that search, in which every setting is named.
        """
        former = {
            name: getattr(stored.train, name)
            for name in DEFAULTS_OF_TRIALS
            if name not in self.train.model_fields_set
        }
        return self.model_copy(update={"train": self.train.model_copy(update=former)})

    @property
    def promotion_train(self) -> TrainSettings:
        """How a promotion trains, but for what a recipe changes. Raises ConfigError."""
        merged = self.train.model_dump() | self.promotion.train
        return parse_section(TrainSettings, merged, where="promotion.train")

    @property
    def promotion_shape(self) -> Shape:
        """The workers of a promotion. Raises ConfigError."""
        own, general = self.promotion.resources, self.resources
        return self.promotion_train.shape._replace(
            accelerator_type=own.accelerator_type or general.accelerator_type,
            strategy=own.placement_strategy or general.placement_strategy,
        )

    @property
    def objectives(self) -> tuple[str, ...]:
        """What the search makes small, under the names of its reports."""
        loss, size = OBJECTIVES
        names = (loss, PER_GPU if self.search.tensor_parallel > 1 else size)
        return names if self.search.decode_context_length is None else (*names, DECODE)

    @property
    def seeds(self) -> list[int]:
        return self.search.seeds or [self.search.seed]

    @property
    def arms(self) -> list[ArmSection]:
        """What runs, the baseline among it."""
        recipes, baseline = self.search.recipes, self.search.baseline
        return (
            recipes
            if baseline in [arm.name for arm in recipes]
            else [ArmSection(recipe=baseline), *recipes]
        )


def check_worker_gpus(settings: TrainSettings, section: str) -> None:
    """Raise ConfigError if each worker would have several GPUs, of which it uses one.

    Args:
        settings: Of the training.
        section: Of the configuration that they come from.
    """
    if settings.gpus_per_worker > 1:
        raise ConfigError(
            f"{section}.gpus_per_worker: a worker computes on one GPU, got "
            f"{settings.gpus_per_worker:g}, of which the others would be idle; set it to 1 and "
            f"num_workers to {settings.num_workers * settings.gpus_per_worker:g}"
        )


def read_search_config(path: str | Path, overrides: Iterable[str] = ()) -> SearchConfig:
    """Read a YAML file and apply `key=value` overrides (dotted keys, YAML values).

    Raises ConfigError.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"no configuration file at {str(path)!r}; `headfold init MODEL` writes one"
        )
    record = read_sections(file)
    for override in overrides:
        apply_override(record, override)
    config = parse_config(record, where=str(path))
    _check_relative(config.model.path, file)
    return config


def _check_relative(model: str, file: Path) -> None:
    """Raise ConfigError for a model that is a folder only from where the file lies."""
    name = Path(model).expanduser()
    if name.is_absolute() or name.exists():
        return
    parents = file.absolute().parents
    for start in (parents[0], *parents[1:2]):
        if (start / name).is_dir():
            raise ConfigError(
                f"model.path: got {model!r}, which is relative to the current folder, and there is "
                f"none of that name in {str(Path.cwd())!r}; there is {str(start / name)!r}: run "
                f"from {str(start)!r}, or give the whole path"
            )


def parse_config(record: Mapping[str, Any], where: str = "the configuration") -> SearchConfig:
    """Validate a mapping. Raises ConfigError with one line for each wrong key."""
    return parse_section(SearchConfig, record, where)


def check_training(train: TrainSettings) -> None:
    """Check that DeepSpeed takes `train.deepspeed`, and that the workers miss no package.

    Raises:
        ConfigError: For what DeepSpeed refuses; it is loaded only where there is any.
        ModuleNotFoundError: Without PEFT, for `train.tuning: lora`.
    """
    if train.tuning == "lora":
        from trainers.adapters import check_peft

        check_peft()
    if train.deepspeed:
        from trainers.zero import check_deepspeed

        try:
            check_deepspeed(train)
        except ValueError as error:
            raise ConfigError(str(error)) from None


# ---- the verbs train and finetune ----------------------------------------------------------------


ScratchRecipe = Literal["transformer", "dcformer"]


class TrainSection(Section):
    """What `train --set` reaches.

    `composition.KEY` are settings of `Composition`, `train.KEY` those of `TrainSettings`.
    """

    recipe: ScratchRecipe
    composition: dict[str, Any] = Field(default_factory=dict)
    train: TrainSettings = TrainSettings()


class FineTuneSection(Section):
    """What `finetune --set` reaches: `train.KEY`, settings of `TrainSettings`."""

    train: TrainSettings = TrainSettings()


def apply_train_options(
    record: dict[str, Any], overrides: Iterable[str], learning_rate: float, seed: int
) -> dict[str, Any]:
    """Return `record` with the overrides (`train.KEY=VALUE`, ...) and the options that have a flag.

    Raises ConfigError for one that is given both ways.
    """
    for override in overrides:
        apply_override(record, override)
    train = record.setdefault("train", {})
    if isinstance(train, dict):
        for name in ("learning_rate", "seed"):
            if name in train:
                raise ConfigError(
                    f"train.{name}: it has an option of its own; give it as "
                    f"--{name.replace('_', '-')}"
                )
        record["train"] = train | {"learning_rate": learning_rate, "seed": seed}
    return record


def check_train_options(
    section: type[Section],
    record: dict[str, Any],
    overrides: Iterable[str],
    learning_rate: float,
    seed: int,
) -> None:
    """Raise ConfigError for unknown keys and wrong values of `--set`.

    No library that takes long to import is needed.
    """
    parse_section(
        section, apply_train_options(record, overrides, learning_rate, seed), "this training"
    )
