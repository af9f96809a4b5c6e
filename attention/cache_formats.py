"""The formats that engines hold a KV cache in: names, bytes, and the flags that choose them.

What a format does to keys and values is computed by `attention.modeling.rounded_cache`.
"""

from __future__ import annotations

from dataclasses import dataclass

from attention.plan import AttentionPlan

LLAMA_CPP = "llama.cpp"
VLLM = "vLLM"
REFERENCE_BYTES = 2
"""Of a number of the 16-bit cache that shares are relative to."""


class CacheFormatError(ValueError):
    """A cache format that is unknown, or that no engine holds for a model."""


@dataclass(frozen=True)
class CacheFormat:
    """How keys or values lie in a cache.

    Attributes:
        name: The word by which engines know it.
        engines: Those that hold it.
        block: Numbers in a row of one head that share a scale; 1 where there is none.
        block_bytes: Bytes of such a block, its scales with it.
    """

    name: str
    engines: tuple[str, ...]
    block: int
    block_bytes: int

    @property
    def bits(self) -> float:
        """Bits a number, scales included."""
        return 8 * self.block_bytes / self.block

    @property
    def share(self) -> float:
        """Bytes relative to 16 bits a number."""
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


FORMATS: dict[str, CacheFormat] = {
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
_VLLM_NAMES = {"f16": "float16", "bf16": "bfloat16", "fp8": "fp8"}


def _without_blocks() -> str:
    return ", ".join(each.name for each in FORMATS.values() if each.block == 1)


@dataclass(frozen=True)
class CachePair:
    """The formats of keys and of values, which llama.cpp chooses apart."""

    keys: CacheFormat
    values: CacheFormat

    @classmethod
    def parse(cls, text: str) -> CachePair:
        """Read `q8_0`, or keys and values apart: `q8_0,q4_0`.

        Raises:
            CacheFormatError: For an unknown name, or formats that no engine holds together.
        """
        names = [name.strip().lower() for name in text.split(",")]
        if not 1 <= len(names) <= 2 or any(name not in FORMATS for name in names):
            raise CacheFormatError(
                f"expected one of {', '.join(FORMATS)}, or two of them for keys and values apart "
                f"(e.g. q8_0,q4_0), got {text!r}"
            )
        pair = cls(FORMATS[names[0]], FORMATS[names[-1]])
        if not pair.engines:
            raise CacheFormatError(
                f"no engine holds keys in {names[0]} beside values in {names[-1]}: vLLM has one "
                "format for both, and llama.cpp holds "
                + ", ".join(name for name, each in FORMATS.items() if LLAMA_CPP in each.engines)
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
        return FORMATS["q8_0"] if self.keys.block > 1 else None

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
        key_bytes = self.keys.head_bytes(plan.head_dim)
        value_bytes = self.values.head_bytes(plan.head_dim)
        composed = plan.kv_bytes_per_token("float16") - (
            REFERENCE_BYTES * plan.kv_heads * plan.head_dim
        )
        return composed + sum(
            layer.key_heads * key_bytes + layer.value_heads * value_bytes for layer in plan.layers
        )

    def flags(self, engine: str) -> str:
        """Return the words on an engine's command line that choose this cache."""
        if engine == VLLM:
            return f"--kv-cache-dtype {_VLLM_NAMES[self.keys.name]}"
        return f"--cache-type-k {self.keys.name} --cache-type-v {self.values.name} --flash-attn on"


OFFERED = tuple(
    CachePair.parse(text)
    for text in ("f16", "q8_0", "fp8", "q8_0,q5_1", "q8_0,q4_0", "q5_1", "q4_0")
)
"""What is offered beside conversions: the caches of engines that lose least at their bytes."""
