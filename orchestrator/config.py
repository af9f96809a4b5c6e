"""One YAML file describes a search. Unknown keys are refused; every error names path, value and what is allowed.

The sections lie here but for `train`, which lies beside its consumer (`trainers.settings.TrainSettings`).
"""

from __future__ import annotations

import difflib
import itertools
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from trainers.settings import TrainSettings


class ConfigError(ValueError):
    """A configuration that cannot be run. The message names key, value and remedy."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _ratio(value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError("a KV ratio must lie in (0, 1]; 0.25 keeps a quarter of the KV cache of multi-head attention")
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


KVRatio = Annotated[float, AfterValidator(_ratio)]
Name = Annotated[str, AfterValidator(_slug)]


class ModelSection(Section):
    """The checkpoint to convert: a folder with safetensors or a name on the hub."""

    path: str = Field(min_length=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class TextSection(Section):
    """`tokens` of text from `source` (where it is not given: `data.source`)."""

    tokens: PositiveInt
    source: str | None = None


class DataSection(Section):
    """Texts for training, for the held-out loss, and for calibration.

    A source is `stdlib`, a local .txt / .jsonl / .json / .parquet file, a folder or glob of them, or a dataset name on
    the hub (`name:split` for a split of its own).
    """

    source: str = Field(default="stdlib", min_length=1)
    sequence_length: int = Field(default=256, ge=2)
    train: TextSection = TextSection(tokens=262_144)
    eval: TextSection = TextSection(tokens=16_384)
    calibration: TextSection = TextSection(tokens=16_384)
    text_field: str = "text"

    def section(self, split: str) -> tuple[str, int]:
        """Source and token count of "train", "eval" or "calibration"."""
        text: TextSection = getattr(self, split)
        return text.source or self.source, text.tokens


class SearchSection(Section):
    """Which candidates are tried.

    Every recipe runs at every budget with every learning rate; then come `samples` candidates that the searcher
    draws from the joint space, which `choices` restricts (`{grouping: [exact, merge]}`) and in which `settings`
    fixes knobs (`{grouping.iterations: 50}`). `baseline` always runs, is never stopped early, and is what a promotion
    must beat.
    """

    searcher: str = "optuna"
    recipes: Annotated[list[str], AfterValidator(_distinct)] = Field(default=["gqa", "headfold"], min_length=1)
    budgets: Annotated[list[KVRatio], AfterValidator(_distinct)] = Field(min_length=1)
    learning_rates: Annotated[list[PositiveFloat], AfterValidator(_distinct)] = []
    samples: int = Field(default=0, ge=0)
    choices: dict[str, list[Any]] = {}
    settings: dict[str, Any] = {}
    baseline: str = "gqa"
    seed: int = Field(default=0, ge=0)


class RungsSection(Section):
    """Cumulative training steps at which trials are measured and the weaker ones stopped.

    At each rung a trial goes on if it is among the best 1 / `reduction_factor` of its budget so far.
    """

    steps: Annotated[list[int], AfterValidator(_milestones)] = Field(default=[0, 50, 200], min_length=1)
    reduction_factor: float = Field(default=2.0, gt=1)


class PromotionSection(Section):
    """Which trials go on to the full training, and what they must pass.

    `select`: the `top` best trials at each budget, or every trial on the front. `steps` is added to the steps of the
    last rung, with `evaluations` measurements on the way. The gate asks for a held-out loss that is below the
    baseline's by more than `margin` nats a token at the same budget and tokens; KV bytes as planned; and logits of the
    exported checkpoint within `logit_tolerance` of the trained model's.
    """

    enabled: bool = True
    select: Literal["best_per_budget", "front"] = "best_per_budget"
    top: PositiveInt = 1
    steps: int = Field(default=0, ge=0)
    evaluations: PositiveInt = 1
    margin: float = Field(default=0.0, ge=0)
    logit_tolerance: PositiveFloat = 1e-4
    registered_name: Name | None = None


class TrackingSection(Section):
    """MLflow: any tracking URI; without one a sqlite store in the storage folder."""

    uri: str | None = None
    experiment: str = Field(default="headfold", min_length=1)


class ResourcesSection(Section):
    """How trials share the cluster.

    `max_concurrent` trials at a time; `auto` derives it from what the cluster has. `driver_cpus`, `driver_gpus`: of a
    trial's own process, which plans, converts and measures the untrained model before its workers start.
    """

    max_concurrent: Literal["auto"] | PositiveInt = "auto"
    driver_cpus: float = Field(default=0.05, gt=0)
    driver_gpus: float = Field(default=0.0, ge=0)


class SearchConfig(Section):
    """A whole search. `storage` is a folder that every node of the cluster sees."""

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

    @property
    def learning_rates(self) -> list[float]:
        return self.search.learning_rates or [self.train.learning_rate]

    @property
    def recipes(self) -> list[str]:
        """The recipes to run, the baseline among them."""
        named = self.search.recipes
        return named if self.search.baseline in named else [self.search.baseline, *named]


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> SearchConfig:
    """Read a YAML file and apply `key=value` overrides (dotted keys, YAML values). Raises ConfigError."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"no configuration file at {str(path)!r}; see configs/ for examples")
    try:
        record = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(record).__name__}")
    for override in overrides:
        apply_override(record, override)
    return parse_config(record, where=str(path))


def apply_override(record: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in place. Raises ConfigError if it has no `=` or walks through a plain value."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"an override must read key=value, e.g. search.samples=4, got {override!r}")
    *parents, last = key.strip().split(".")
    node = record
    for depth, parent in enumerate(parents):
        if node.get(parent) is None:
            node[parent] = {}
        node = node[parent]
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(parents[: depth + 1])} is a value, not a section")
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from None


def parse_config(record: Mapping[str, Any], where: str = "the configuration") -> SearchConfig:
    """Validate a mapping. Raises ConfigError with one line for each wrong key."""
    try:
        return SearchConfig.model_validate(record)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors(include_url=False)]
        raise ConfigError(
            f"{where} cannot be used:\n" + "\n".join(f"  {line}" for line in dict.fromkeys(lines))
        ) from None


def _explain(item: Any) -> str:
    place = [part for part in item["loc"] if part not in ("literal['auto']", "constrained-int")]
    path = ".".join(str(part) for part in place)
    if item["type"] == "extra_forbidden":
        allowed = sorted(_fields_at(place[:-1]))
        return f"{path}: unknown key{_suggest(str(place[-1]), allowed)}; allowed here: {', '.join(allowed)}"
    if item["type"] == "missing":
        return f"{path}: required, but not given"
    message = item["msg"].removeprefix("Value error, ")
    return f"{path}: got {item['input']!r}; {message[:1].lower()}{message[1:]}"


def _suggest(word: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, allowed, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _fields_at(place: Sequence[Any]) -> Iterable[str]:
    """Field names of the section at a path of keys."""
    model: Any = SearchConfig
    for part in place:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            return ()
        model = _model_in(field.annotation)
    return getattr(model, "model_fields", {})


def _model_in(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((a for a in typing.get_args(annotation) if hasattr(a, "model_fields")), None)
    return annotation
