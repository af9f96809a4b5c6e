"""Plans of each kind that engines are asked to hold, for tiny models of two layers of four heads."""

from __future__ import annotations

from attention.plan import AttentionPlan, LayerPlan


def together(*maps: tuple[int, ...]) -> tuple[LayerPlan, ...]:
    """Layers whose keys and values have one map."""
    return tuple(LayerPlan(one, one) for one in maps)


def plans(head_dim: int) -> dict[str, AttentionPlan]:
    apart = (LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 1, 0), (0, 1, 1, 0)))
    kinds = {
        "uniform": together((0, 1, 1, 0), (0, 0, 1, 1)),
        "layers": together((0, 1, 1, 2), (0, 0, 0, 0)),
        "unequal": together((0, 0, 0, 1), (0, 1, 1, 1)),
        "apart": apart,
    }
    return {name: AttentionPlan(layers, head_dim) for name, layers in kinds.items()}
