"""Sections of a search's configuration that say what is searched: model, texts, candidates, rungs.

A docstring below a key is its meaning everywhere: in docs/reference/config.md and in
docs/config.schema.json.
"""

from __future__ import annotations

import itertools
import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
)

from attention.cache_formats import CachePair
from attention.io.dtype_names import SHORT_DTYPES, full_name
from trainers.settings import Seed, StrictModel


class Section(StrictModel, BaseModel):
    """One section of the file."""


def _ratio(value: float) -> float:
    if not 0 < value <= 1:
        mistyped = f"; did you mean {value / 100:g}?" if 2 <= value < 100 else ""
        raise ValueError(
            "a KV ratio must lie in (0, 1); 0.25 keeps a quarter of the checkpoint's own KV "
            f"cache{mistyped}"
        )
    return value


def _share(value: Any) -> Any:
    """`50%` is 0.5."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*", value)):
        return float(Decimal(match[1]) / 100)
    return value


def _slug(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
        raise ValueError(
            "a name must be 1 to 64 letters, digits, '.', '_' or '-', and start with a letter or "
            "digit"
        )
    return value


def distinct(values: list) -> list:
    """Return the values. Raises ValueError if one is there twice."""
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
    """Refuse KV heads together with KV ratios."""
    if kv_heads and info.data.get("kv_ratios"):
        raise ValueError(
            "give kv_ratios (shares of the checkpoint's own KV cache) or kv_heads, not both"
        )
    return kv_heads


def _either(kv_heads: list[int], info: ValidationInfo) -> list[int]:
    # Not there at all if it was refused itself
    if not kv_heads and info.data.get("kv_ratios") == []:
        raise ValueError(
            "expected at least 1 value in search.kv_ratios, e.g. [0.5, 0.25], or in search.kv_heads"
        )
    return kv_heads


KVRatio = Annotated[
    float,
    Field(allow_inf_nan=True),  # its own words for nan
    BeforeValidator(_share, json_schema_input_type=float | str),
    AfterValidator(_ratio),
]
_KVRatios = Annotated[list[KVRatio], AfterValidator(distinct)]
_KVHeads = Annotated[list[PositiveInt], AfterValidator(distinct), AfterValidator(_not_both)]
Name = Annotated[str, AfterValidator(_slug)]


class ModelSection(Section):
    """The checkpoint to convert."""

    path: str = Field(min_length=1)
    """A folder with safetensors, a GGUF file, or a name on the hub."""
    teacher: str | None = Field(default=None, min_length=1)
    """The model to distil from, e.g. the fine-tuned checkpoint; none: the checkpoint itself.
    """
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        BeforeValidator(
            full_name,
            json_schema_input_type=Literal["auto", "float32", "bfloat16", "float16", *SHORT_DTYPES],
        ),
    ] = "auto"
    """What converted and promoted checkpoints are written in, and bytes counted in; auto: the
    checkpoint's own.
    """
    dequantize: bool = False
    """Read quantised weights (FP8, compressed-tensors, MXFP4) as plain numbers; a GGUF file does
    not need this key.
    """
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    def with_folders(self, **folders: str) -> ModelSection:
        """Return the same section opened from other folders (`path`, `teacher`): plain copies.

        Its form that is saved in files still names the sources.
        """
        sources = {
            key: str(getattr(self, key))
            for key, folder in folders.items()
            if folder != getattr(self, key)
        }
        opened = self.model_copy(update=folders)
        opened._sources = self._sources | sources
        return opened

    @model_serializer(mode="wrap")
    def _as_named(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return handler(self) | self._sources


class TextSection(Section):
    """A number of tokens of a text."""

    tokens: PositiveInt
    """Number of tokens."""
    source: str | None = None
    """Where they come from, as in `data.source`; none: `data.source` itself."""


class DataSection(Section):
    """Texts for training, for the held-out loss, and for calibration."""

    source: str = Field(default="builtin", min_length=1)
    """`builtin` (Python's help topics and standard library, prose and code; to try things out),
    `stdlib` (the source of the standard library), a local .txt / .jsonl / .json / .parquet file,
    a folder or glob of them, or a dataset name on the hub (`name:split` for one of its splits).
    """
    sequence_length: int = Field(default=256, ge=2)
    """Tokens per sequence, of all texts; at most the positions of the model."""
    train: TextSection = TextSection(tokens=524_288)
    """The text that trials and promotions are trained on."""
    eval: TextSection = TextSection(tokens=16_384)
    """The held-out text that losses are measured on: no document of it is trained or calibrated on.
    """
    test: TextSection | None = None
    """The text that the gate and the model card compare losses on: held-out documents of which no
    token is in `eval`, by which steps, trials and finalists are chosen. none: source and number of
    tokens of `eval`, or as many as its documents leave.
    """
    calibration: TextSection = TextSection(tokens=16_384)
    """The text that statistics of the heads are collected on, by which plans are made."""
    text_field: str = "text"
    """The field of a record, or the column, that contains the text.

    Without it conversations are taken, from `messages` (role, content) or `conversations` (from,
    value), by the tokenizer's chat template.
    """
    max_epochs: PositiveFloat = 1.0
    """How often one training may read the text of `train`; a search whose longest training
    needs more is refused.
    """

    def section(self, split: str) -> tuple[str, int]:
        """Source and token count of "train", "eval", "test" or "calibration"."""
        text: TextSection = getattr(self, split) or self.eval
        return text.source or self.source, text.tokens


class ArmSection(Section):
    """One arm of the comparison: a recipe under its own name.

    It may have other choices than the named recipe.
    """

    recipe: str = Field(min_length=1)
    """A named recipe, e.g. gqa or headfold."""
    label: Name | None = None
    """The arm's name in reports; none: that of its recipe."""
    kv_ratios: _KVRatios = []
    """Its own KV ratios; none: those of the search."""
    kv_heads: _KVHeads = []
    """The same in KV heads."""
    changes: dict[str, Any] = {}
    """Other parts on the axes of the recipe, e.g. `{alignment: procrustes}`."""
    params: dict[str, Any] = {}
    """Values of the parameters of its parts, e.g. `{relaxation.rate: 0.1}`."""
    learning_rates: Annotated[list[PositiveFloat], AfterValidator(distinct)] = []
    """Its own learning rates; none: those of the search."""

    @property
    def name(self) -> str:
        return self.label or self.recipe


def _arm(value: Any) -> Any:
    """Return an arm for the name of a recipe alone."""
    return {"recipe": value} if isinstance(value, str) else value


def _names(arms: list[ArmSection]) -> list[ArmSection]:
    distinct([arm.name for arm in arms])
    return arms


Arm = Annotated[ArmSection, BeforeValidator(_arm, json_schema_input_type=str | ArmSection)]
Arms = Annotated[list[Arm], AfterValidator(_names)]


def _cache_format(value: str) -> str:
    return CachePair.parse(value).name


CacheFormatName = Annotated[str, AfterValidator(_cache_format)]


def _export_target(value: Any) -> Any:
    """llama.cpp's name for its format."""
    return {"llama.cpp": "gguf"}.get(value, value) if isinstance(value, str) else value


class SearchSection(Section):
    """Which candidates are tried.

    Every recipe runs at every KV ratio with every learning rate and seed; then come `num_samples`
    candidates that the searcher draws from the joint space.
    """

    target: Annotated[
        Literal["any", "gqa", "phi", "per_layer", "vllm", "gguf", "transformers"],
        BeforeValidator(
            _export_target,
            json_schema_input_type=Literal[
                "any", "gqa", "phi", "per_layer", "vllm", "gguf", "transformers", "llama.cpp"
            ],
        ),
    ] = "any"
    """The engine or export format that the results are for; any: no restriction.

    Every candidate is a plan that this engine loads at the plan's bytes; others are refused.
    """
    searcher: str = Field(default="optuna", min_length=1)
    """What draws the samples: grid (none of them: named recipes alone), random, optuna, or asymgqa,
    whose samples are the probes of its walks, with the best plan of each ratio as one more
    candidate.
    """
    recipes: Arms = Field(
        default=[ArmSection(recipe="gqa"), ArmSection(recipe="headfold")], min_length=1
    )
    """The arms of the comparison: names of recipes, or arms with changes."""
    kv_ratios: _KVRatios = []
    """Shares of the checkpoint's own KV cache to keep at most, e.g.

    `[0.5, 0.25]` or `[50%, 25%]`: each recipe takes its largest plan at or below each. 1, the whole
    cache, is for recipes that change something else.
    """
    kv_heads: Annotated[_KVHeads, AfterValidator(_either)] = Field(
        default=[], validate_default=True
    )
    """Instead of `kv_ratios`: the largest average number of KV heads per layer, e.g. `[4, 2]`."""
    strict: bool = False
    """Whether a ratio that a recipe cannot meet exactly is refused."""
    learning_rates: Annotated[list[PositiveFloat], AfterValidator(distinct)] = []
    """Every arm without its own rates runs with each, and is compared at its best; none:
    `train.learning_rate`."""
    distillations: Annotated[list[Literal["none", "kl", "kl_bild"]], AfterValidator(distinct)] = []
    """Objectives of training, as in `train.distillation`: every recipe that does not set its own
    runs with each, and is compared at its best; none: `train.distillation`."""
    num_samples: int = Field(default=0, ge=0, le=1_000_000)
    """Candidates that the searcher draws after the named ones."""
    search_space: dict[str, list[Any]] = {}
    """What the searcher draws from: the parts allowed on some axes, e.g.

    `{grouping: [exact, merge]}`.
    """
    params: dict[str, Any] = {}
    """Parameters that are fixed while it draws, e.g.

    `{grouping.iterations: 50}`, and those of the searcher itself, e.g. `{searcher.chains: 4}`.
    """
    decode_context_length: PositiveInt | None = None
    """If given, the engine of `target` is timed before the trials, and its decode time per token at
    a context of so many tokens is a third objective after loss and bytes."""
    tensor_parallel: PositiveInt = 1
    """GPUs among which vLLM divides the heads (`--tensor-parallel-size`).

    With more than 1 the bytes of the front, of the searcher and of the choice for the promotion are
    those of a token on each GPU, where a layer keeps one KV head at least. `target` must be one
    that vLLM loads; head counts that the GPUs cannot divide are refused.
    """
    cache_formats: Annotated[list[CacheFormatName], AfterValidator(distinct)] | None = None
    """Formats of an engine's KV cache in which the original, the front, the baselines and the
    promoted models are measured once the trials have finished: the front in engine bytes.

    E.g. `[f16, q8_0, "q8_0,q4_0"]`, keys and values apart after a comma. none: those that the
    engine of `target` supports, or any engine; `[]`: no such measurement.
    """
    baseline: str = Field(default="gqa", min_length=1)
    """The arm that always runs, at every KV ratio of any arm, is never stopped early, and is what a
    promotion must beat.
    """
    seed: Seed = 0
    """Random seed of the searcher and the texts."""
    seeds: Annotated[list[Seed], AfterValidator(distinct)] = []
    """Random seeds of plans and trainings: every recipe runs with each; none: `seed`."""


class RungsSection(Section):
    """When trials are measured and the weaker ones stopped."""

    steps: Annotated[list[int], AfterValidator(_milestones)] = Field(
        default=[0, 50, 200], min_length=1
    )
    """Cumulative training steps, increasing; the first is 0, the converted model before any
    training.
    """
    reduction_factor: float = Field(default=2.0, gt=1)
    """At each rung about one in so many trials continues."""
    stop: bool = True
    """With false every trial continues to the end, as a comparison of recipes needs."""
    scheduler: str = "asha"
    """Which trials continue. asha: the best of each KV ratio so far, others are stopped for good.
    front: halving by loss and bytes together, in which trials are paused and may continue later.
    none: all.
    """
    params: dict[str, Any] = {}
    """Parameters of the scheduler; `front` has `ties` and `synchronous`."""
