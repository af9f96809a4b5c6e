"""What a checkpoint's heads are, read from its config alone (no weights are touched).

Legend: L layers, H query heads, d head dim, D model dim, r rotary dims of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

ROTARY_STYLES = ("none", "half", "interleaved")


@dataclass(frozen=True)
class RotaryLayout:
    """Which dims of a head RoPE rotates together.

    Attributes:
        head_dim: d.
        dims: r; the dims from r on are free of rotation (partial rotary).
        style: "half": dims i and i + r/2 of the first r dims are a pair (`rotate_half`);
            "interleaved": dims 2i and 2i + 1. Without rotary embedding r is 0.
    """

    head_dim: int
    dims: int
    style: str = "half"

    def __post_init__(self) -> None:
        if self.style not in ROTARY_STYLES:
            raise ValueError(f"rotary style must be one of {ROTARY_STYLES}, got {self.style!r}")
        if (
            self.dims % 2
            or not 0 <= self.dims <= self.head_dim
            or (self.style == "none") != (self.dims == 0)
        ):
            raise ValueError(
                f"rotary dims must be even and in [0, {self.head_dim}], got {self.dims} "
                f"({self.style})"
            )

    @classmethod
    def none(cls, head_dim: int) -> RotaryLayout:
        """Return the layout of heads without rotary embedding."""
        return cls(head_dim, 0, "none")

    @property
    def first(self) -> tuple[int, ...]:
        """The first dim of each pair."""
        step = 1 if self.style == "half" else 2
        return tuple(i * step for i in range(self.dims // 2))

    @property
    def second(self) -> tuple[int, ...]:
        """The second dim of each pair, in the order of `first`."""
        offset = self.dims // 2 if self.style == "half" else 1
        return tuple(i + offset for i in self.first)

    @property
    def free(self) -> tuple[int, ...]:
        """The dims that no rotation touches."""
        return tuple(range(self.dims, self.head_dim))


@dataclass(frozen=True)
class HeadGeometry:
    """The attention heads of a checkpoint: counts, dims, rotary layout, KV map, biases and norms.

    Attributes:
        qk_norm: Queries and keys are normalised after projection.
        whole_norm: The norm is over all heads of a layer together, not over each head.
        centred_norm: The mean is subtracted first, as by a layer norm.
        value_norm: Values of each head are divided by their root mean square after projection.
        rotary_layers: For each layer whether it rotates at all; None if all do.
        pads_queries: A stock checkpoint may have more query heads than the model, so that zero
            query heads can make up groups of unequal size (`attention.io.targets._pairs`).
        decoder_layers: Indices of the decoder layers that `num_layers` counts, where others are
            converted with no plan: their attention is the stock one. None if all are counted.
        other_layers: KV heads and head dim of each of the others that has a cache.
        head_norms: Norms of queries and keys have weights of each head's own.
        window: Tokens that a sliding window keeps in view in some layers; 0 if no layer has one.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotaryLayout
    query_bias: bool
    key_bias: bool
    value_bias: bool
    output_bias: bool
    qk_norm: bool
    max_positions: int
    vocab_size: int
    whole_norm: bool = False
    centred_norm: bool = False
    rotary_layers: tuple[bool, ...] | None = None
    pads_queries: bool = True
    value_norm: bool = False
    decoder_layers: tuple[int, ...] | None = None
    other_layers: tuple[tuple[int, int], ...] = ()
    head_norms: bool = False
    window: int = 0

    @property
    def keeps_signs(self) -> bool:
        """Whether the norm of each head lets signs of rotary pairs pass.

        See `attention.conversion.fusion.signs`.
        """
        return self.qk_norm and not self.whole_norm and not self.centred_norm

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "head_dim",
            "max_positions",
            "vocab_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"the config's {name} must be at least 1, got {getattr(self, name)}"
                )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads, got {self.num_kv_heads} and "
                f"{self.num_heads}"
            )

    def layer(self, index: int) -> HeadGeometry:
        """Return the geometry of layer `index`, which may have no rotary embedding."""
        if self.rotary_layers is None or self.rotary_layers[index]:
            return self
        return replace(self, rotary=RotaryLayout.none(self.head_dim))

    @property
    def kv_map(self) -> tuple[int, ...]:
        """The KV head that each query head reads in the checkpoint as it is."""
        return tuple(h * self.num_kv_heads // self.num_heads for h in range(self.num_heads))

    @property
    def kv_ratio(self) -> float:
        """KV heads over query heads of the checkpoint as it is; 1 for MHA.

        A user's ratio is a share of something else, the checkpoint's own cache
        (`attention.ratios`).
        """
        return self.num_kv_heads / self.num_heads
