"""Running a model in part: up to one of its modules and no further, or with other hidden states in one of its layers.

Legend: B sequences, T tokens, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Reached(Exception):
    """The wanted module has been reached: what lies above it need not run."""


class Call(NamedTuple):
    """What a layer or attention module was called with, and what it made of it: `output [B, T, D]`, or None where the
    module itself did not run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def stream(self) -> Tensor:
        """The hidden states that went in, `[B, T, D]`."""
        return entering(self.args, self.kwargs)


@torch.no_grad()
def run_to(model: PreTrainedModel, module: nn.Module, ids: Tensor, *, through: bool = True) -> Call:
    """Run `ids [B, T]` up to `module` of the decoder, and `through` it or not. Nothing above runs."""
    calls: list[Call] = []

    def reached(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        calls.append(Call(args, kwargs, output[0] if isinstance(output, tuple) else output))
        raise _Reached

    register = module.register_forward_hook if through else module.register_forward_pre_hook
    hook = register(reached, with_kwargs=True)
    try:
        model.get_decoder()(input_ids=ids.to(model.device), use_cache=False)
    except _Reached:
        pass
    finally:
        hook.remove()
    return calls[0]


def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states among the arguments of a layer or attention module."""
    return args[0] if args else kwargs["hidden_states"]


def entered_by(stream: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The same arguments with other hidden states."""
    return ((stream, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": stream})


def layer_of(model: PreTrainedModel, module: nn.Module) -> nn.Module:
    """The decoder layer that holds an attention module."""
    path = next(name for name, candidate in model.named_modules() if candidate is module)
    return model.get_submodule(path.rpartition(".")[0])


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients, and the mode that was there before afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
