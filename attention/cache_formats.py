"""The formats that engines hold a KV cache in: names, bytes, and the flags that choose them.

What a format does to keys and values is computed by `attention.modeling.rounded_cache`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from attention.base.text import number
from attention.plan import AttentionPlan
from attention.ratios import percent

LLAMA_CPP = "llama.cpp"
VLLM = "vLLM"
REFERENCE_BYTES = 2
"""Of a number of the 16-bit cache that shares are relative to."""


class CacheFormatError(ValueError):
    """A cache format that is unknown, or that no engine holds for a model."""


@dataclass(frozen=True)
class CacheFormat:
    """How a cache stores keys or values.

    Attributes:
        name: Name in the engines.
        engines: Engines that have it.
        block: Consecutive numbers of one head that share a scale; 1 without scales.
        block_bytes: Bytes of a block, its scales included.
    """

    name: str
    engines: tuple[str, ...]
    block: int
    block_bytes: int

    @property
    def bits(self) -> float:
        """Bits per number, scales included."""
        return 8 * self.block_bytes / self.block

    @property
    def share(self) -> float:
        """Bytes relative to 16 bits per number."""
        return self.block_bytes / (self.block * REFERENCE_BYTES)

    def head_bytes(self, width: int) -> int:
        """Return the bytes of one head of `width` numbers.

        Raises:
            CacheFormatError: For a width that is no whole number of blocks, which the engine
                refuses.
        """
        if width % self.block:
            raise CacheFormatError(
                f"{self.name} holds blocks of {self.block} numbers of a head, and heads of this "
                f"model have {width}; choose a format without blocks: {_without_blocks()}"
            )
        return width // self.block * self.block_bytes


CACHE_FORMATS: dict[str, CacheFormat] = {
    each.name: each
    for each in (
        CacheFormat("f16", (LLAMA_CPP, VLLM), 1, 2),
        CacheFormat("bf16", (LLAMA_CPP, VLLM), 1, 2),
        CacheFormat("fp8", (VLLM,), 1, 1),
        CacheFormat("q8_0", (LLAMA_CPP,), 32, 34),
        CacheFormat("q5_1", (LLAMA_CPP,), 32, 24),
        CacheFormat("q4_0", (LLAMA_CPP,), 32, 18),
    )
}
_VLLM_NAMES = {"f16": "float16", "bf16": "bfloat16"}


def _without_blocks() -> str:
    return ", ".join(each.name for each in CACHE_FORMATS.values() if each.block == 1)


@dataclass(frozen=True)
class CachePair:
    """The formats of keys and of values, which llama.cpp chooses apart."""

    keys: CacheFormat
    values: CacheFormat

    @classmethod
    def parse(cls, text: str) -> CachePair:
        """Read `q8_0`, or keys and values apart: `q8_0,q4_0` or `q8_0/q4_0`.

        Raises:
            CacheFormatError: For an unknown name, or formats that no engine holds together.
        """
        names = [name.strip().lower() for name in text.replace("/", ",").split(",")]
        if not 1 <= len(names) <= 2 or any(name not in CACHE_FORMATS for name in names):
            raise CacheFormatError(
                f"expected one of {', '.join(CACHE_FORMATS)}, or two of them for keys and values "
                f"apart (e.g. q8_0,q4_0), got {text!r}"
            )
        pair = cls(CACHE_FORMATS[names[0]], CACHE_FORMATS[names[-1]])
        if not pair.engines:
            raise CacheFormatError(
                f"no engine supports keys in {names[0]} with values in {names[-1]}: vLLM has one "
                "format for both, and llama.cpp supports "
                + ", ".join(
                    name for name, each in CACHE_FORMATS.items() if LLAMA_CPP in each.engines
                )
            )
        return pair

    @property
    def name(self) -> str:
        """What `parse` reads."""
        if self.keys == self.values:
            return self.keys.name
        return f"{self.keys.name},{self.values.name}"

    @property
    def queries(self) -> CacheFormat | None:
        """What the engine rounds queries to before it multiplies them with keys; None: nothing.

        llama.cpp's products of blocks take blocks of 8 bits.
        """
        return CACHE_FORMATS["q8_0"] if self.keys.block > 1 else None

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that hold both."""
        return tuple(
            engine
            for engine in self.keys.engines
            if engine in self.values.engines and (engine == LLAMA_CPP or self.keys == self.values)
        )

    def bytes_per_token(self, plan: AttentionPlan) -> int:
        """Return the bytes of a token's keys and values, as the engine holds them.

        Numbers that composition caches, which no engine holds, count 16 bits.

        Raises:
            CacheFormatError: For heads that are no whole number of blocks.
        """
        heads = plan.kv_heads * plan.head_dim + plan.other_numbers
        composed = plan.kv_bytes_per_token("float16") - REFERENCE_BYTES * heads
        return (
            composed
            + self.bytes_of(plan.other_layers)
            + sum(
                layer.key_heads * self.keys.head_bytes(layer.key_width * plan.head_dim)
                + layer.value_heads * self.values.head_bytes(layer.value_width * plan.head_dim)
                for layer in plan.layers
            )
        )

    def bytes_of(self, layers: Sequence[tuple[int, int]]) -> int:
        """Return the bytes per token of layers of so many KV heads and such a head dim each.

        Raises:
            CacheFormatError: As `bytes_per_token`.
        """
        return sum(
            heads * (self.keys.head_bytes(head_dim) + self.values.head_bytes(head_dim))
            for heads, head_dim in layers
        )

    @property
    def vllm_name(self) -> str:
        """What vLLM calls this cache."""
        return _VLLM_NAMES.get(self.keys.name, self.keys.name)

    def flags(self, engine: str) -> str:
        """Return the words on an engine's command line that choose this cache."""
        if engine == VLLM:
            return f"--kv-cache-dtype {self.vllm_name}"
        return f"--cache-type-k {self.keys.name} --cache-type-v {self.values.name} --flash-attn on"


AS_WEIGHTS = CachePair(*2 * (CacheFormat("auto", (VLLM,), 1, REFERENCE_BYTES),))
"""vLLM's default: keys and values in the dtype of the weights; the bytes are of 16-bit weights."""


def read_pairs(text: str | Sequence[str]) -> tuple[CachePair, ...]:
    """Read several formats: `f16,q8_0,q8_0/q4_0`, or a sequence of what `CachePair.parse` reads.

    Raises:
        CacheFormatError: As `CachePair.parse`, and for a format that is listed twice.
    """
    entries = text.split(",") if isinstance(text, str) else text
    pairs = tuple(CachePair.parse(entry) for entry in entries)
    if len(set(pairs)) < len(pairs):
        names = [pair.name for pair in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CacheFormatError(
            f"{twice} is listed twice; list each format once, and write keys and values apart "
            "with a slash, e.g. f16,q8_0,q8_0/q4_0"
        )
    return pairs


OFFERED = tuple(CachePair.parse(text) for text in ("q8_0", "fp8", "q8_0,q4_0", "q4_0"))
"""Formats that tables show next to conversions: those that lose least at their bytes."""
NEAR = 0.04
"""A format answers a request whose share of the bytes is so much smaller: q8_0 with 53 % that of
half."""


def engine_formats(engine: str | None = None) -> tuple[CachePair, ...]:
    """Return 16 bits and those of `OFFERED` that an engine holds.

    Args:
        engine: `LLAMA_CPP` or `VLLM`; None for any.
    """
    pairs = (CachePair.parse("f16"), *OFFERED)
    return tuple(pair for pair in pairs if engine is None or engine in pair.engines)


@dataclass(frozen=True)
class CacheOption:
    """A cache format, and how many of a model's KV heads a size leaves room for with it.

    Attributes:
        share: Bytes of the whole model's cache in this format, relative to 16 bits a number.
        kv_ratio: Share of the KV heads of converted layers that fit; 1 and more where all do, and
            below 0 where those of the other layers do not.
    """

    pair: CachePair
    share: float
    kv_ratio: float


def cache_options(
    plan: AttentionPlan, engine: str, share: float, pair: CachePair | None = None
) -> list[CacheOption]:
    """Return the formats that an engine can hold a cache of so many bytes in, by rising bytes.

    Args:
        plan: Of the model as it is.
        engine: `LLAMA_CPP` or `VLLM`.
        share: Bytes of the cache, relative to those of `plan` in 16 bits.
        pair: The one format; None for 16 bits and those of `OFFERED` that the engine holds.

    Raises:
        CacheFormatError: For a `pair` that the engine does not hold for such heads.
    """
    if pair is not None and engine not in pair.engines:
        raise CacheFormatError(
            f"{engine} does not hold a cache in {pair.name}, {' and '.join(pair.engines)} does"
        )
    options: list[CacheOption] = []
    for each in engine_formats(engine) if pair is None else (pair,):
        try:
            format_share = format_record(each, plan)["share"]
        except CacheFormatError:
            if pair is None:
                continue
            raise
        others = each.bytes_of(plan.other_layers)
        heads = share * plan.kv_bytes_per_token("float16") - others
        kv_ratio = heads / (each.bytes_per_token(plan) - others)
        options.append(CacheOption(each, format_share, kv_ratio))
    return sorted(options, key=lambda option: option.share)


class FormatRecord(TypedDict):
    """A model as it is, with its cache in formats that an engine holds.

    The increase is that of the loss over a cache that is not rounded, in nats per token.
    """

    cache_format: str
    engines: list[str]
    flags: list[str]
    """On the command line of each of the engines."""
    kv_bytes_per_token: int
    share: float
    """Of the bytes in 16 bits."""
    loss_increase: NotRequired[float]
    loss_increase_stderr: NotRequired[float | None]


def format_record(
    pair: CachePair, plan: AttentionPlan, original: AttentionPlan | None = None
) -> FormatRecord:
    """Return what a cache in these formats takes for a plan.

    Args:
        pair: The formats of keys and values.
        plan: Of the model.
        original: The plan whose cache in 16 bits the share is relative to; by default `plan`.

    Raises:
        CacheFormatError: For heads that are no whole number of blocks.
    """
    held = pair.bytes_per_token(plan)
    return {
        "cache_format": pair.name,
        "engines": list(pair.engines),
        "flags": [pair.flags(engine) for engine in pair.engines],
        "kv_bytes_per_token": held,
        "share": held / (original or plan).kv_bytes_per_token("float16"),
    }


def offered_formats(plan: AttentionPlan, engine: str | None = None) -> list[FormatRecord]:
    """Return the formats of `OFFERED` that an engine holds for a plan, by falling bytes.

    Args:
        engine: The engine; None for any.
    """
    records: list[FormatRecord] = []
    for pair in OFFERED:
        if engine is None or engine.lower() in {name.lower() for name in pair.engines}:
            try:
                records.append(format_record(pair, plan))
            except CacheFormatError:
                continue
    return sorted(records, key=lambda record: -record["share"])


def format_advice(records: Sequence[FormatRecord], share: float, model: str) -> str:
    """Say which formats alone answer a request of so large a share of the 16-bit cache.

    Of each engine that which keeps most bytes. Empty where no engine has a format.

    Args:
        records: As of `offered_formats`.
        share: The requested share.
        model: What the user calls the model.
    """
    if not records:
        return ""
    first: dict[str, FormatRecord] = {}
    for record in records:
        if record["share"] <= share + NEAR:
            first.setdefault(record["engines"][0], record)
    if not first:
        least = records[-1]
        return (
            f"{percent(share)} of the 16-bit cache is below what a cache format alone reaches "
            f"({_words(least)}); formats and conversions multiply"
        )
    words = ", or ".join(_words(record) for record in first.values())
    name, *others = (record["cache_format"] for record in first.values())
    measured = any("loss_increase" in record for record in first.values())
    path = shlex.quote(model)
    how = f"; measure it: headfold evaluate {path} --original {path} --cache-format {name}"
    how += "".join(f" (or {other})" for other in others)
    return f"{percent(share)} without any conversion: a cache in {words}" + how * (not measured)


def _words(record: FormatRecord) -> str:
    engine = record["engines"][0]
    words = f"{record['cache_format']} ({engine}) has {percent(record['share'])} of the bytes"
    if "loss_increase" not in record:
        return words
    error = record.get("loss_increase_stderr")
    deviation = "" if error is None else f" ± {error:.3f}"
    return f"{words}, loss {number(record['loss_increase'], '+z.3f')}{deviation}"
