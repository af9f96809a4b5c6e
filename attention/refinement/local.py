"""Local fit: each converted attention layer is trained alone towards the original layer's output.

No language-model loss and no backward pass through the model: the inputs are those of the *original* model at that
layer, so layers do not depend on each other.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.axes import Knob
from attention.families import family_of
from attention.geometry import HeadGeometry
from attention.modeling import plan_of
from attention.refinement.axis import REFINEMENT, LayerFit, RefinementReport
from attention.refinement.capture import Record, held_out, run_to
from attention.refinement.healing import HEAL_KNOBS, heal_layer

FIT_KNOBS = (
    Knob("fit_steps", "int", 60, "Adam steps a layer", 1, 100_000),
    Knob("fit_lr", "log_float", 1e-3, "largest learning rate of the fit, linear to 0", 1e-6, 1.0),
    Knob("fit_batch", "int", 8, "sequences a step", 1, 1024),
)


def _call(module: nn.Module, record: Record) -> Tensor:
    kwargs = {**record.kwargs, "past_key_values": None, "use_cache": False}
    output = module(*record.args, **kwargs)
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def _error(module: nn.Module, records: list[Record]) -> float:
    """`|attention - target|^2 / |target|^2` over all records."""
    wrong = sum((_call(module, r) - r.output).double().square().sum() for r in records)
    power = sum(r.output.double().square().sum() for r in records)
    return float(wrong / power)


def _train(module: nn.Module, records: list[Record], steps: int, lr: float) -> None:
    """Adam on the module's own weights, one record a step in turn, learning rate linear to 0."""
    weights = [p.requires_grad_(True) for p in module.parameters()]
    optimiser = torch.optim.Adam(weights, lr=lr)
    power = sum(float(r.output.square().mean()) for r in records) / len(records)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = lr * (1 - step / steps)
        record = records[step % len(records)]
        loss = (_call(module, record) - record.output).square().mean() / power
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()


def fit_layer(
    original: PreTrainedModel, converted: PreTrainedModel, sequences: Tensor, layer: int, knobs: dict[str, Any]
) -> LayerFit:
    """Train one attention layer of `converted` in place, if that helps on held-out sequences.

    Raises ValueError for a model with shared heads, whose weights serve other layers as well.
    """
    if shares := plan_of(converted).shares:
        raise ValueError(
            f"a local fit trains each layer alone, and {len(shares)} heads of this model are shared among layers; "
            "train the whole model, or use refinement=heal"
        )
    source = family_of(original.config).attention_modules(original)[layer]
    module = family_of(converted.config).attention_modules(converted)[layer]
    fit, check = held_out(sequences)
    seen = list(run_to(original, source, fit, knobs["fit_batch"]))
    unseen = list(run_to(original, source, check, knobs["fit_batch"]))
    before, kept = _error(module, unseen), copy.deepcopy(module.state_dict())
    wanted = {name: p.requires_grad for name, p in module.named_parameters()}
    with torch.enable_grad():
        _train(module, seen, knobs["fit_steps"], knobs["fit_lr"])
    for name, p in module.named_parameters():
        p.requires_grad_(wanted[name]).grad = None
    result = LayerFit("fit", layer, before, _error(module, unseen))
    if not result.kept:
        module.load_state_dict(kept)
    return result


@REFINEMENT.part(
    "fit_heal",
    source="ours (docs/methods.md, section 6): local fit, then heal",
    knobs=FIT_KNOBS + HEAL_KNOBS,
    needs=("sequences",),
)
def fit_heal(
    original: PreTrainedModel, converted: PreTrainedModel, sequences: Tensor, **knobs: Any
) -> RefinementReport:
    """Local fit of every layer, then heal from the first layer to the last."""
    layers = range(HeadGeometry.from_config(converted.config).num_layers)
    fits = [fit_layer(original, converted, sequences, i, knobs) for i in layers]
    return RefinementReport((*fits, *(heal_layer(original, converted, sequences, i, knobs) for i in layers)))
