"""Training the projections that make keys and values alone: what a conversion has changed most.

All else stays.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from attention.families import family_of
from attention.geometry import HeadGeometry
from attention.modeling.composition import compositions
from attention.modeling.shared_weights import SharedProjection

_PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")
"""The projections of keys and values in the families, with the queries where a family fuses
them."""


def freeze_all_but_keys_and_values(model: PreTrainedModel) -> None:
    """In place. Composition stays trained, as it does with adapters.

    Raises:
        ValueError: For a model whose layers share heads, since a weight of one serves others there,
            and for a family without any of `_PROJECTIONS`.
    """
    modules = family_of(model.config).attention_modules(model)
    if any(isinstance(part, SharedProjection) for module in modules for part in module.children()):
        raise ValueError(
            "tuning kv: layers of this model share heads, and so their weights; use tuning=full"
        )
    makers = [
        part for module in modules for name, part in module.named_children() if name in _PROJECTIONS
    ]
    trained = {id(p) for part in (*makers, *compositions(model)) for p in part.parameters()}
    if not makers:
        raise ValueError(
            f"tuning kv: no attention of this model has any of {', '.join(_PROJECTIONS)}; use "
            f"tuning=full"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def key_value_parameters(geometry: HeadGeometry) -> int:
    """Numbers in the key and value projections and their biases, at most.

    A converted model has fewer heads.
    """
    width = geometry.num_kv_heads * geometry.head_dim * (geometry.hidden_size + 1)
    return 2 * geometry.num_layers * width
