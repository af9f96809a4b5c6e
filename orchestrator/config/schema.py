"""One YAML file describes a search. Unknown keys are refused; every error names path, value and what is allowed.

The sections lie here but for `train`, which lies beside its consumer (`trainers.settings.TrainSettings`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from attention.io.dtype_names import full_name
from orchestrator.config.parsing import ConfigError, apply_override, parse_section, read_sections
from trainers.settings import AUTO, Seed, Shape, Strategy, Strict, TrainSettings

OBJECTIVES = ("loss", "kv_bytes_per_token")
"""What a search makes small, under the names of its reports; one that measures decode time has DECODE too."""
DECODE = "decode_seconds_per_token"


class Section(Strict, BaseModel):
    """One section of the file."""


def _ratio(value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError("a KV ratio must lie in (0, 1]; 0.25 keeps a quarter of the checkpoint's own KV cache")
    return value


def _slug(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
        raise ValueError("a name must be 1 to 64 letters, digits, '.', '_' or '-', and start with a letter or digit")
    return value


def _distinct(values: list) -> list:
    repeated = sorted({v for v in values if values.count(v) > 1}, key=str)
    if repeated:
        raise ValueError(f"values must be distinct, got {repeated[0]!r} more than once")
    return values


def _milestones(steps: list[int]) -> list[int]:
    if steps[0] != 0:
        raise ValueError("the first rung must be 0: the converted model before any training step")
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise ValueError("rungs are cumulative steps and must increase")
    return steps


def _not_both(kv_heads: list[int], info: ValidationInfo) -> list[int]:
    """KV heads in place of KV ratios, not beside them."""
    if kv_heads and info.data.get("kv_ratios"):
        raise ValueError("give kv_ratios (shares of the checkpoint's own KV cache) or kv_heads, not both")
    return kv_heads


def _either(kv_heads: list[int], info: ValidationInfo) -> list[int]:
    if not kv_heads and info.data.get("kv_ratios") == []:  # not there at all if it was refused itself
        raise ValueError("expected at least 1 value in search.kv_ratios, e.g. [0.5, 0.25], or in search.kv_heads")
    return kv_heads


KVRatio = Annotated[float, Field(allow_inf_nan=True), AfterValidator(_ratio)]  # its own words for nan
KVRatios = Annotated[list[KVRatio], AfterValidator(_distinct)]
KVHeads = Annotated[list[PositiveInt], AfterValidator(_distinct), AfterValidator(_not_both)]
Name = Annotated[str, AfterValidator(_slug)]


class ModelSection(Section):
    """The checkpoint to convert: a folder with safetensors or a name on the hub.

    `teacher`: what is distilled from, e.g. the checkpoint after fine-tuning (none: the checkpoint itself). `dtype`:
    what converted and promoted checkpoints are written in, and bytes counted in (auto: the checkpoint's own).
    """

    path: str = Field(min_length=1)
    teacher: str | None = Field(default=None, min_length=1)
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(full_name)] = "auto"


class TextSection(Section):
    """`tokens` of text from `source` (where it is not given: `data.source`)."""

    tokens: PositiveInt
    source: str | None = None


class DataSection(Section):
    """Texts for training, for the held-out loss, and for calibration.

    A source is `stdlib`, a local .txt / .jsonl / .json / .parquet file, a folder or glob of them, or a dataset name on
    the hub (`name:split` for a split of its own). `max_epochs`: how often one training may go through the text of
    `train`; a search whose longest training needs more is refused.
    """

    source: str = Field(default="stdlib", min_length=1)
    sequence_length: int = Field(default=256, ge=2)
    train: TextSection = TextSection(tokens=524_288)
    eval: TextSection = TextSection(tokens=16_384)
    calibration: TextSection = TextSection(tokens=16_384)
    text_field: str = "text"
    max_epochs: PositiveFloat = 1.0

    def section(self, split: str) -> tuple[str, int]:
        """Source and token count of "train", "eval" or "calibration"."""
        text: TextSection = getattr(self, split)
        return text.source or self.source, text.tokens


class ArmSection(Section):
    """One arm of the comparison: a recipe, with other choices where wanted, under a name of its own.

    `changes`: other parts on its axes (`{alignment: procrustes}`); `params`: values of their parameters
    (`{relaxation.rate: 0.1}`); `kv_ratios`, or `kv_heads`: its own (none: those of the search).
    """

    recipe: str = Field(min_length=1)
    label: Name | None = None
    kv_ratios: KVRatios = []
    kv_heads: KVHeads = []
    changes: dict[str, Any] = {}
    params: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self.label or self.recipe


def _arm(value: Any) -> Any:
    """A recipe's name alone is an arm too."""
    return {"recipe": value} if isinstance(value, str) else value


def _names(arms: list[ArmSection]) -> list[ArmSection]:
    _distinct([arm.name for arm in arms])
    return arms


Arm = Annotated[ArmSection, BeforeValidator(_arm)]
Arms = Annotated[list[Arm], AfterValidator(_names)]


def _export_target(value: Any) -> Any:
    """llama.cpp's name for its format."""
    return {"llama.cpp": "gguf"}.get(value, value) if isinstance(value, str) else value


class SearchSection(Section):
    """Which candidates are tried.

    A KV ratio is the share of the checkpoint's own KV cache that is kept; in place of `kv_ratios`, `kv_heads` says how
    many of its KV heads a layer (on average) are.

    Every recipe (a name, or an arm with changes) runs at every KV ratio with every learning rate and seed; then come
    `num_samples` candidates that the searcher draws from the joint space, which `search_space` restricts
    (`{grouping: [exact, merge]}`) and in which `params` fixes parameters (`{grouping.iterations: 50}`, and
    `{searcher.chains: 4}` for one of the searcher). With searcher `asymgqa` the samples are the probes of its walks,
    and the best plan of each ratio is one more candidate. `baseline` always runs, at every KV ratio of any arm, is
    never stopped early, and is what a promotion must beat. `seed` is of the searcher and the texts; `seeds` (none:
    `seed`) are those of plans and trainings. `target`: the engine that the results are for, by its export
    target (`any`: none in particular): every candidate is then a plan that it holds exactly, at the plan's own bytes,
    and what does not go there is refused. With `decode_context_length` the engine is timed before the trials, and its
    decode time a token at a context of so many tokens is a third objective beside loss and bytes.
    """

    target: Annotated[Literal["any", "gqa", "phi", "vllm", "gguf", "transformers"], BeforeValidator(_export_target)] = (
        "any"
    )
    searcher: str = Field(default="optuna", min_length=1)
    recipes: Arms = Field(default=[ArmSection(recipe="gqa"), ArmSection(recipe="headfold")], min_length=1)
    kv_ratios: KVRatios = []
    kv_heads: Annotated[KVHeads, AfterValidator(_either)] = Field(default=[], validate_default=True)
    learning_rates: Annotated[list[PositiveFloat], AfterValidator(_distinct)] = []
    num_samples: int = Field(default=0, ge=0, le=1_000_000)
    search_space: dict[str, list[Any]] = {}
    params: dict[str, Any] = {}
    decode_context_length: PositiveInt | None = None
    baseline: str = Field(default="gqa", min_length=1)
    seed: Seed = 0
    seeds: Annotated[list[Seed], AfterValidator(_distinct)] = []


class RungsSection(Section):
    """Cumulative training steps at which trials are measured and the weaker ones stopped.

    At each rung about 1 / `reduction_factor` of the trials goes on: `scheduler` says which (`asha`: the best of each
    KV ratio so far, the others are stopped for good), `params` are its own. With `stop` false every trial goes on to
    the end, as a comparison of recipes wants it.
    """

    steps: Annotated[list[int], AfterValidator(_milestones)] = Field(default=[0, 50, 200], min_length=1)
    reduction_factor: float = Field(default=2.0, gt=1)
    stop: bool = True
    scheduler: str = "asha"
    params: dict[str, Any] = {}


class PlaceSection(Section):
    """Where the workers of a promotion run (none: as those of the trials, see `resources`)."""

    accelerator_type: str | None = Field(default=None, min_length=1)
    placement_strategy: Strategy | None = None


class PromotionSection(Section):
    """Which trials go on to the full training, how they are trained, and what they must pass.

    `select`: the `top` best trials at each KV ratio, or every trial on the front. `steps` is added to the steps of
    the last rung, with `evaluations` measurements on the way. `train`: settings that differ from the trials'
    (`{num_workers: 32, learning_rate: 1e-5}`); `data`: fresh training text (none: that of the trials, read on);
    `resources`: where its workers run. The learning rate has a schedule of its own, which warms up again. A
    checkpoint is kept at each measurement, and in between every `checkpoint_steps` steps, or after
    `checkpoint_minutes` at the latest. Of all that was measured of a trial, the untrained conversion included, the
    step of lowest held-out loss is shipped. The gate asks that this loss is below the baseline's (at its own best
    step of equally many) by more than `margin` nats a token at the same KV ratio; KV bytes as planned; and logits of
    the exported checkpoint within `logit_tolerance` of the trained model's. `tasks` of lm-evaluation-harness are run on
    what is exported, on the original model and on the baseline: `demo`, folders of task files that every node sees, or
    the harness's own names; with `max_task_drop` the gate asks that no task's accuracy is lower than the original's by
    more. In the same way `prompts` are continued side by side, and at `context_lengths` the loss by position and the
    recall of a hidden line are measured; with `max_recall_drop` the gate limits how far recall may fall.
    """

    enabled: bool = True
    select: Literal["best_per_budget", "front"] = "best_per_budget"
    top: PositiveInt = 1
    steps: int = Field(default=0, ge=0)
    evaluations: PositiveInt = 4
    train: dict[str, Any] = {}
    data: TextSection | None = None
    resources: PlaceSection = PlaceSection()
    checkpoint_steps: PositiveInt | None = None
    checkpoint_minutes: PositiveFloat = 30.0
    margin: float = Field(default=0.0, ge=0)
    logit_tolerance: PositiveFloat = 1e-4
    tasks: Annotated[list[str], AfterValidator(_distinct)] = []
    max_task_drop: float | None = Field(default=None, ge=0, le=1)
    prompts: list[Annotated[str, Field(min_length=1)]] = []
    context_lengths: Annotated[list[PositiveInt], AfterValidator(_distinct)] = []
    max_recall_drop: float | None = Field(default=None, ge=0, le=1)
    registered_name: Name | None = None

    @model_validator(mode="after")
    def _of_limits(self) -> PromotionSection:
        if self.max_task_drop is not None and not self.tasks:
            raise ValueError(f"max_task_drop {self.max_task_drop:g} needs tasks, got none; set tasks, e.g. [demo]")
        if self.max_recall_drop is not None and not self.context_lengths:
            raise ValueError(
                f"max_recall_drop {self.max_recall_drop:g} needs context_lengths, got none; set them, e.g. [512]"
            )
        return self


class TrackingSection(Section):
    """MLflow: any tracking URI; without one a sqlite store in the storage folder."""

    uri: str | None = None
    experiment: str = Field(default="headfold", min_length=1)


class ResourcesSection(Section):
    """How trials share the cluster.

    `max_concurrent` trials at a time; `auto` derives it from what fits the nodes of the cluster one by one, also while
    it grows and shrinks. `trial_cpus`, `trial_gpus`: of what plans, converts and measures the untrained model before a
    trial's workers start. With GPUs this is a task of its own, and they are free again while the workers train.
    `reuse_workers`: workers take one training after another, so that a trial waits for no process to start; they end
    after `idle_seconds` without one. With false every training starts workers of its own; `auto` does so where workers
    have GPUs and the model a billion parameters or more.

    `accelerator_type`: workers run on nodes with these GPUs alone, by Ray's name of them (A100, A10G, H100; none: on
    any node). `trial_accelerator_type`: the same for planning and measuring (none: that of the workers).
    `placement_strategy`: how the workers of a training lie on nodes, in Ray's words: STRICT_PACK all on one node, PACK
    on few, SPREAD on many; `auto`: on one where a node of the cluster can hold them, else on few.

    For estimates and bills: `tokens_per_second` that one worker trains on (none: measured where it can be), and
    `price_per_hour` of a GPU, or of a CPU where workers have no GPU, in whatever money.
    """

    max_concurrent: Literal["auto"] | PositiveInt = "auto"
    trial_cpus: float = Field(default=0.05, gt=0)
    trial_gpus: float = Field(default=0.0, ge=0)
    accelerator_type: str | None = Field(default=None, min_length=1)
    trial_accelerator_type: str | None = Field(default=None, min_length=1)
    placement_strategy: Strategy = AUTO
    reuse_workers: Literal["auto"] | bool = "auto"
    idle_seconds: PositiveFloat = 300.0
    tokens_per_second: PositiveFloat | None = None
    price_per_hour: PositiveFloat | None = None

    @model_validator(mode="after")
    def _asked_for(self) -> ResourcesSection:
        if self.trial_gpus > 1 and self.trial_gpus % 1:
            raise ValueError(f"trial_gpus must be a whole number, or a part of one GPU, got {self.trial_gpus:g}")
        if self.trial_accelerator_type and not self.trial_gpus:
            raise ValueError(
                f"trial_accelerator_type {self.trial_accelerator_type!r} needs trial_gpus above 0, got 0: without GPUs "
                "plans are made wherever there is a CPU; set trial_gpus=1 or leave it out"
            )
        return self


class SearchConfig(Section):
    """A whole search.

    `storage` is a folder that every node of the cluster sees, or an address (s3://bucket/path, gs://...) that is kept
    up to date with a working folder below HEADFOLD_HOME, which every node sees.
    """

    name: Name
    model: ModelSection
    data: DataSection = DataSection()
    search: SearchSection
    rungs: RungsSection = RungsSection()
    train: TrainSettings = TrainSettings()
    promotion: PromotionSection = PromotionSection()
    tracking: TrackingSection = TrackingSection()
    storage: str = Field(default="runs", min_length=1)
    resources: ResourcesSection = ResourcesSection()

    @field_validator("train")
    @classmethod
    def _comparable(cls, train: TrainSettings) -> TrainSettings:
        if train.min_workers is not None:
            raise ValueError(
                f"num_workers: a range is for promotion.train, got [{train.min_workers}, {train.num_workers}]: trials "
                "are compared, also by their speed; give one number"
            )
        return train

    @property
    def learning_rates(self) -> list[float]:
        return self.search.learning_rates or [self.train.learning_rate]

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
        return OBJECTIVES if self.search.decode_context_length is None else (*OBJECTIVES, DECODE)

    @property
    def seeds(self) -> list[int]:
        return self.search.seeds or [self.search.seed]

    @property
    def arms(self) -> list[ArmSection]:
        """What runs, the baseline among it."""
        recipes, baseline = self.search.recipes, self.search.baseline
        return recipes if baseline in [arm.name for arm in recipes] else [ArmSection(recipe=baseline), *recipes]


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> SearchConfig:
    """Read a YAML file and apply `key=value` overrides (dotted keys, YAML values). Raises ConfigError."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no configuration file at {str(path)!r}; see configs/ for examples")
    record = read_sections(file)
    for override in overrides:
        apply_override(record, override)
    return parse_config(record, where=str(path))


def parse_config(record: Mapping[str, Any], where: str = "the configuration") -> SearchConfig:
    """Validate a mapping. Raises ConfigError with one line for each wrong key."""
    return parse_section(SearchConfig, record, where)
