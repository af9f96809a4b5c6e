"""Shares of a checkpoint's own KV cache.

The one place where ratios and numbers of heads are turned into each other.

Legend: L layers, U KV heads per layer that the checkpoint stores.

A *KV ratio*, in all inputs and outputs, is kept key and value heads over the 2 L U of the
checkpoint. The bytes that composition adds to the cache are not part of it; they are counted in the
bytes per token.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

from attention.geometry import HeadGeometry
from attention.plan import BYTES, AttentionPlan, cached_numbers, number_bytes

ROUNDING = 2e-6  # of a ratio that was typed, or stored as a decimal

UNITS = {"share": "", "heads": " KV heads per layer", "bytes": " KV bytes per token"}
"""Units that a budget is requested and reported in, and what follows its number."""


def own_heads(geometry: HeadGeometry) -> int:
    """Return key heads plus value heads of the checkpoint as it is, over all layers: 2 L U."""
    return 2 * geometry.num_layers * geometry.num_kv_heads


def ratio_of(plan: AttentionPlan, stored_heads: float) -> float:
    """Return the share that `plan` keeps of a checkpoint's `stored_heads` (see `own_heads`)."""
    return plan.kv_heads / stored_heads


def whole_heads(kv_ratio: float | Fraction, heads: int) -> int:
    """Return `kv_ratio * heads` as an integer.

    Raises:
        ValueError: Unless the ratio is in (0, 1] and the product is whole.
    """
    if not 0 < kv_ratio <= 1:
        raise ValueError(f"kv_ratio must lie in (0, 1], got {float(kv_ratio)}")
    exact = float(kv_ratio) * heads
    if abs(exact - round(exact)) > 1e-6 * heads or round(exact) < 1:
        raise ValueError(
            f"kv_ratio {float(kv_ratio):g} of {heads} heads is {exact:g}, not a whole number"
        )
    return round(exact)


def most_heads(kv_ratio: float | Fraction, geometry: HeadGeometry) -> int:
    """Return the most key heads plus value heads within `kv_ratio` of a checkpoint's `own_heads`.

    A decimal of three digits or more that a fraction of a layer's KV heads was rounded to stands
    for that fraction: 0.333 and 0.3333 of three KV heads are one of them.

    Raises:
        ValueError: Unless the ratio is in (0, 1].
    """
    if not 0 < kv_ratio <= 1:
        raise ValueError(f"kv_ratio must lie in (0, 1], got {float(kv_ratio)}")
    stored_heads = own_heads(geometry)
    stored = geometry.num_kv_heads
    exact = float(kv_ratio) * stored_heads
    if abs(exact - round(exact)) <= 1e-6 * stored_heads:
        return round(exact)
    digits = -int(Decimal(str(float(kv_ratio))).as_tuple().exponent)
    nearest = round(kv_ratio * stored)
    if digits >= 3 and 0 < nearest < stored and abs(nearest / stored - kv_ratio) < 10.0**-digits:
        return nearest * stored_heads // stored
    return int(exact)


def ratio_of_kv_heads(kv_heads: int, geometry: HeadGeometry) -> float:
    """Return the ratio that keeps `kv_heads` of the checkpoint's U KV heads, on average per layer.

    Raises:
        ValueError: Unless it is an integer from 1 to U - 1.
    """
    stored_heads = geometry.num_kv_heads
    if type(kv_heads) is not int or not 1 <= kv_heads < stored_heads:
        raise ValueError(
            f"got {kv_heads}, but {own_cache(geometry)}: "
            + (
                f"give 1 to {stored_heads - 1} of them to keep"
                if stored_heads > 1
                else "there are none to share"
            )
        )
    return kv_heads / stored_heads


def is_met(requested: float, used: float) -> bool:
    """Return whether no less is used than was requested, up to the digits that were typed."""
    return used >= requested - ROUNDING


def percent(ratio: float) -> str:
    """Return a KV ratio as text: 0.125 -> 12.5%, 0.25 -> 25%."""
    return f"{100 * ratio:.4g}%"


def amount(ratio: float, unit: str, geometry: HeadGeometry, dtype: Any) -> str:
    """Return a share of the checkpoint's own KV cache as a number for people.

    Args:
        ratio: The share.
        unit: One of `UNITS`.
        geometry: That of the checkpoint.
        dtype: That of the cache.
    """
    if unit == "heads":
        return f"{ratio * geometry.num_kv_heads:.4g}"
    if unit != "bytes":
        return percent(ratio)
    return f"{bytes_of_ratio(ratio, geometry, number_bytes(dtype)):,}"


def ceiling_note(
    requested: float, used: float, unit: str, geometry: HeadGeometry, dtype: Any
) -> str:
    """Return `requested 50%, using 48.89%: 44 of 90 KV heads`; empty if the request is met."""
    if is_met(requested, used):
        return ""
    stored_heads = own_heads(geometry)
    heads = round(used * stored_heads)
    pairs = f"{heads // 2} of {stored_heads // 2} KV heads"
    counted = pairs if heads % 2 == 0 else f"{heads} of {stored_heads} key and value heads"
    requested_amount, used_amount = (
        amount(ratio, unit, geometry, dtype) for ratio in (requested, used)
    )
    return f"requested {requested_amount}{UNITS[unit]}, using {used_amount}: {counted}"


def own_bytes(geometry: HeadGeometry, dtype: Any) -> int:
    """Return the bytes per token of the checkpoint's own KV cache.

    Args:
        geometry: That of the checkpoint.
        dtype: Of the cache, a torch dtype or its name.
    """
    return bytes_of_ratio(1.0, geometry, number_bytes(dtype))


def bytes_of_ratio(ratio: float, geometry: HeadGeometry, itemsize: int) -> int:
    """Return the bytes per token of a share of the checkpoint's own heads.

    Layers that are not converted count whole.

    Args:
        ratio: The share.
        geometry: That of the checkpoint.
        itemsize: Bytes of a number of the cache.
    """
    converted = round(own_heads(geometry) * geometry.head_dim * itemsize * ratio)
    return converted + itemsize * cached_numbers(geometry.other_layers)


def byte_share(ratio: float, geometry: HeadGeometry) -> float:
    """Return the share of the bytes of the whole cache where a share of the converted heads stays.

    The two differ where layers are not converted.
    """
    converted = own_heads(geometry) * geometry.head_dim
    others = cached_numbers(geometry.other_layers)
    return (others + ratio * converted) / (others + converted)


def ratio_of_bytes(size: float, geometry: HeadGeometry, dtype: Any) -> float:
    """Return the share of the checkpoint's own heads that takes `size` bytes per token.

    It is below 0 where the layers that are not converted take more.
    """
    fixed = bytes_of_ratio(0.0, geometry, number_bytes(dtype))
    return (size - fixed) / (own_bytes(geometry, dtype) - fixed)


def own_cache(geometry: HeadGeometry, dtype: Any = None) -> str:
    """Describe the checkpoint's own cache, in bytes if `dtype` is given.

    Args:
        geometry: That of the checkpoint.
        dtype: A torch dtype or its name.
    """
    heads = geometry.num_kv_heads
    shared = "" if heads == geometry.num_heads else f" for {geometry.num_heads} query heads"
    words = (
        f"the checkpoint has {heads} KV head{'s' * (heads > 1)} per layer{shared}, "
        f"{geometry.num_layers} layers"
    )
    if others := len(geometry.other_layers):
        words += f" that are converted and {others} that are not"
    name = str(dtype).removeprefix("torch.")
    if name in BYTES:
        words += f", {own_bytes(geometry, name):,} KV bytes per token in {name}"
    return words
