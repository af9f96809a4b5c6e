"""One YAML file describes a search.

Unknown keys are refused; every error names path, value and what is allowed.

The sections are here and in `orchestrator.config.sections`, except `train`, which is next to its
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

    The learning rate has its own schedule, which warms up again. The measured step with the lowest
    held-out loss is shipped, which may be the untrained conversion. The gate requires that this
    loss is below the baseline's (at its own best of as many steps) at the same KV ratio, that KV
    bytes are as planned, and that the exported checkpoint has the same logits.
    """

    enabled: bool = True
    """With false a search ends with its front."""
    select: Literal["best_per_budget", "front"] = "best_per_budget"
    """The `top` best trials at each KV ratio, or every trial on the front."""
    top: PositiveInt = 1
    """Number of trials at each KV ratio."""
    steps: int = Field(default=0, ge=0)
    """Training steps, added to those of the last rung."""
    keep_weights: Literal["all", "finalists"] = "all"
    """Which weights stay when a trial has finished. all: of every trial, the converted weights and
    those of its last and its best step, so that `headfold promote` can take any of them later.
    finalists: only of the trials that are promoted as configured here and of the baseline, the
    converted weights and those of the best step; recommended for large models."""
    evaluations: PositiveInt = 4
    """Number of measurements during the training, each with a checkpoint."""
    train: dict[str, Any] = Field(default={})
    """Settings that differ from the trials' `train`, e.g. `{num_workers: 32, learning_rate: 1e-5}`.
    """
    data: TextSection | None = None
    """New training text; none: that of the trials, continued."""
    resources: PlaceSection = PlaceSection()
    """Where its workers run."""
    checkpoint_steps: PositiveInt | None = None
    """Steps between two checkpoints, in addition to those of the measurements."""
    checkpoint_minutes: PositiveFloat | None = None
    """Longest time in minutes without a checkpoint; none: that of `resources`."""
    margin: float = Field(default=0.0, ge=0)
    """By how many nats per token the loss must be below the baseline's, on `data.test`."""
    margin_standard_errors: float = Field(default=0.0, ge=0)
    """Additional margin in standard errors of this difference, e.g. 2. The error is that of a
    bootstrap over documents, which both models share; with 0 it is reported and not required."""
    logit_tolerance: PositiveFloat | None = None
    """Largest allowed difference between logits of the exported checkpoint and the trained model;
    none: 8 times the measured effect of another order of sums in float32."""
    tasks: Annotated[list[str], AfterValidator(distinct)] = Field(default=[])
    """Tasks of lm-evaluation-harness that are run on the exported model, on the original model and
    on the baseline: `demo`, folders of task files that every node sees, or the harness's own names.
    """
    max_task_drop: float | None = Field(default=None, ge=0, le=1)
    """The gate requires that no task's accuracy is below the original's by more; needs `tasks`."""
    prompts: list[Annotated[str, Field(min_length=1)]] = Field(default=[])
    """Texts that are continued by the same three models, side by side."""
    context_lengths: Annotated[list[PositiveInt], AfterValidator(distinct)] = Field(default=[])
    """Context lengths at which the loss by position and the recall of a hidden line are measured.
    """
    max_recall_drop: float | None = Field(default=None, ge=0, le=1)
    """The gate requires that recall is not lower than that by more; needs `context_lengths`."""
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
    wandb: str | None = Field(default=None, min_length=1)
    """Project of Weights & Biases to log the trials to as well; needs the extra wandb, and
    WANDB_API_KEY, `wandb login` or WANDB_MODE=offline.
    """


class ResourcesSection(Section):
    """How trials share the cluster."""

    max_concurrent: Literal["auto"] | PositiveInt = "auto"
    """Trials at a time; auto: what fits the nodes of the cluster one by one, also while it grows
    and shrinks.
    """
    trial_cpus: float = Field(default=0.05, gt=0)
    """CPUs for planning, converting and measuring the untrained model before a trial's workers
    start."""
    trial_gpus: float = Field(default=0.0, ge=0)
    """GPUs for the same: a whole number, or a part of one.

    It is then a separate task, and the GPUs are free again while the workers train.
    """
    accelerator_type: str | None = Field(default=None, min_length=1)
    """Workers run on nodes with these GPUs alone, by Ray's name of them (A100, A10G, H100); none:
    on any node.
    """
    trial_accelerator_type: str | None = Field(default=None, min_length=1)
    """The same for planning and measuring; none: that of the workers."""
    plan_ahead: int = Field(default=1, ge=0, le=64)
    """Number of later candidates that are planned and converted on idle GPUs while earlier trials
    plan or train (only with `trial_gpus`).

    Trials and their results do not change: only candidates that will be tried whatever is reported
    until then are prepared. 0: every trial plans for itself.
    """
    hold_nodes: bool = True
    """Keep running worker nodes while later trials need them, where an autoscaler would remove them
    as idle, for example while a trial plans on other nodes."""
    placement_strategy: Strategy = AUTO_STRATEGY
    """How the workers of a training are placed on nodes, in Ray's terms: STRICT_PACK all on one
    node, PACK on few, SPREAD on many; auto: on one if a node of the cluster has room for them, else
    on few."""
    reuse_workers: Literal["auto"] | bool = "auto"
    """Workers take one training after another, so that a trial waits for no process to start.

    With false every training starts its own workers; auto does so if workers have GPUs and the
    model has a billion parameters or more.
    """
    checkpoint_minutes: PositiveFloat = CHECKPOINT_MINUTES
    """Longest time in minutes without a checkpoint of a training, also of a trial's; it continues
    from there after the loss of a machine."""
    idle_seconds: PositiveFloat = 300.0
    """Reused workers end after so many seconds without a training."""
    stall_minutes: PositiveFloat | None = 120.0
    """A search fails with a message after so many minutes without progress while its own processes
    wait for each other and no node can be added; none: no limit."""
    max_wait_hours: float = Field(default=4.0, ge=0)
    """A search fails, and reports the requested and the present resources, if no node has had room
    for one of its processes for so many hours; 0: no limit."""
    tokens_per_second: PositiveFloat | None = None
    """Training speed of one worker, for estimates; none: measured where possible."""
    price_per_hour: PositiveFloat | None = None
    """Price of a GPU, or of a CPU if workers have no GPU, in any currency, for estimates and costs.
    """

    @model_validator(mode="after")
    def _check_resources(self) -> ResourcesSection:
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
    """Objective of the training. kl: KL(original model ‖ model), kl_bild KL + BiLD (Jin 2024),
    none: language modelling alone, which loads no original model."""
    distillation_weight: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of the distillation in the loss; the language-modelling loss keeps the rest."""


DEFAULTS_OF_TRIALS = ("learning_rate", "distillation", "distillation_weight")
"""The settings whose defaults are those of trials alone: a search that was begun when these were
others keeps them."""


class SearchConfig(Section):
    """A whole search."""

    name: Name
    """Name of the search: of its folder in the storage, and of its run in MLflow. 1 to 64 letters,
    digits, '.', '_' or '-'.
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
        """The training settings of a promotion, before those of a recipe. Raises ConfigError."""
        merged = self.train.model_dump() | self.promotion.train
        return parse_section(TrainSettings, merged, where="promotion.train")

    @property
    def promotion_source(self) -> str:
        """The source of a promotion's training text."""
        if self.promotion.data is None:
            return self.data.section("train")[0]
        return self.promotion.data.source or self.data.source

    @property
    def promotion_shape(self) -> Shape:
        """The workers of a promotion. Raises ConfigError."""
        overrides, general = self.promotion.resources, self.resources
        return self.promotion_train.shape._replace(
            accelerator_type=overrides.accelerator_type or general.accelerator_type,
            strategy=overrides.placement_strategy or general.placement_strategy,
        )

    @property
    def objectives(self) -> tuple[str, ...]:
        """The objectives that the search minimises, under the names of its reports."""
        loss, size = OBJECTIVES
        names = (loss, PER_GPU if self.search.tensor_parallel > 1 else size)
        return names if self.search.decode_context_length is None else (*names, DECODE)

    @property
    def seeds(self) -> list[int]:
        return self.search.seeds or [self.search.seed]

    @property
    def arms(self) -> list[ArmSection]:
        """All arms of the search, including the baseline."""
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
    """Raise ConfigError for a model that is a folder only relative to the file's folder."""
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
                    f"train.{name}: it has its own option; give it as --{name.replace('_', '-')}"
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
