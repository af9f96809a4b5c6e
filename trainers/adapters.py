"""LoRA.

A low-rank change of each projection is trained, all else is frozen (Hu 2021; AsymGQA, Tables 1 and
3).

Legend: r rank; a projection `W [out, in]` becomes `W + (alpha / r) B A` with `A [r, in]` and `B
[out, r]`, B = 0 at first, so that training starts at the given model. AsymGQA's paper is **silent**
on r, alpha and which projections.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from attention.families import family_of
from attention.modeling.composition import compositions
from attention.modeling.running import layer_of
from attention.modeling.shared_weights import SharedProjection, sharing_modules

_NAME = "default"  # peft's name of the one adapter
BASE = ".base_layer."
DOWN = f".lora_A.{_NAME}."
UP = f".lora_B.{_NAME}."


def adaptable(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the projections that take an adapter, by name.

    All of attention and MLP in every decoder layer.

    Left out are those that lend or borrow blocks: an adapter there would change some users of a
    weight while training and all of them once it is merged.

    Raises:
        ValueError: If there is no such projection, or one of a kind whose adapter could not be
            merged.
    """
    first = layer_of(model, family_of(model.config).attention_modules(model)[0])
    path = next(name for name, module in model.named_modules() if module is first)
    layers = path.rpartition(".")[0] + "."
    shared = sharing_modules(model)
    projections = {}
    for name, module in model.named_modules():
        if not name.startswith(layers) or name in shared:
            continue
        if type(module) in (nn.Linear, Conv1D):
            projections[name] = module
        elif isinstance(module, nn.Linear | Conv1D | SharedProjection | nn.MultiheadAttention):
            raise ValueError(
                f"tuning lora: {name} is a {type(module).__name__}, whose adapter could not be "
                f"merged; use tuning=full"
            )
    if not projections:
        raise ValueError(
            "tuning lora: every projection of this model shares its weights with another layer, "
            "none is left to "
            "adapt; use tuning=full"
        )
    return projections


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        transposed: By projection, whether its weight is stored as `[in, out]` (GPT-2).
    """

    scaling: float
    transposed: Mapping[str, bool]

    def sources(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Names of the adapted model's state → for each of the plain model what it is made of.

        The tensor itself, and of a projection that has an adapter the two matrices of it too.
        """
        plain = {
            name.replace(BASE, "."): (name,)
            for name in names
            if DOWN not in name and UP not in name
        }
        adapted = {
            f"{name}.weight": tuple(f"{name}{part}weight" for part in (BASE, DOWN, UP))
            for name in self.transposed
        }
        return plain | adapted

    def merged(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Return the plain model's tensor `name`, made of its `sources`.

        Added in float32 at least, rounded once.
        """
        if len(tensors) == 1:
            return tensors[0]
        weight, down, up = tensors
        wide = torch.promote_types(weight.dtype, torch.float32)
        change = self.scaling * (up.to(wide) @ down.to(wide))
        transposed = self.transposed[name.removesuffix(".weight")]
        return (weight.to(wide) + (change.T if transposed else change)).to(weight.dtype)


def check_peft() -> None:
    """Raise ModuleNotFoundError where adapters cannot be made."""
    if find_spec("peft") is None:
        raise ModuleNotFoundError("tuning lora: the package peft is not installed", name="peft")


def add_adapters(
    model: PreTrainedModel, rank: int, alpha: float, generator: torch.Generator
) -> Adapters:
    """Freeze a model and give its projections adapters, in place. What it computes stays the same.

    Composition stays trained as it is: it is small, and where it was just added it has nothing to
    be a change of.

    Raises:
        ValueError: As in `adaptable`, before anything is changed.
    """
    from peft import LoraConfig, inject_adapter_in_model

    projections = adaptable(model)
    # PEFT takes projections for experts where it knows a mixture of experts by its config
    holder = nn.Module()
    holder.model = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that fan_in_fan_out goes by the kind of projection
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=0.0,
            bias="none",
            target_modules=[f"model.{name}" for name in projections],
        )
        inject_adapter_in_model(config, holder, adapter_name=_NAME)
    trained = {id(p) for composition in compositions(model) for p in composition.parameters()}
    missing = set(projections)
    for name, parameter in model.named_parameters():
        down = DOWN in name
        up = UP in name
        parameter.requires_grad_(down or up or id(parameter) in trained)
        if down or up:
            parameter.data = parameter.data.to(model.dtype)
            missing.discard(name.partition(DOWN if down else UP)[0])
        if down:  # peft's own initialisation (that of nn.Linear), but from a generator
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=generator.device)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            parameter.data.copy_(drawn)
    if missing:
        raise ValueError(f"tuning lora: peft gave no adapter to {sorted(missing)}; use tuning=full")
    return Adapters(
        alpha / rank, {name: isinstance(module, Conv1D) for name, module in projections.items()}
    )
