"""Running a model in part.

Up to one of its modules and no further, or with other hidden states in one of its layers.

Legend: B sequences, T tokens, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
AT_ONCE = 8
_TOKENS_AT_ONCE = 2048
"""Sequences that run through a model at once, and tokens of them: fewer of long ones, whose
activations would take more memory and run no faster."""
# Of the attention weights, in float32, of sequences that run through a layer at once.
ATTENTION_BYTES = 128 * 2**20


class _Reached(Exception):
    """The requested module has been reached: those above it need not run."""


class Call(NamedTuple):
    """The inputs that a layer or attention module was called with, and its output.

    `output [B, T, D]`, or None where the module itself did not run.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def stream(self) -> Tensor:
        """The hidden states that went in, `[B, T, D]`."""
        return entering(self.args, self.kwargs)


@torch.no_grad()
def run_to(model: PreTrainedModel, module: nn.Module, ids: Tensor, *, through: bool = True) -> Call:
    """Run `ids [B, T]` up to `module` of the decoder, and `through` it or not.

    Nothing above runs.
    """
    calls: list[Call] = []

    def reached(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None
    ) -> None:
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


def batch_of(length: int, batch_size: int = AT_ONCE) -> int:
    """Sequences of `length` tokens that run through a model at once, at most `batch_size`."""
    return max(1, min(batch_size, _TOKENS_AT_ONCE // length))


def layer_batch(num_heads: int, length: int) -> int:
    """Return how many sequences of `length` tokens run through one layer at once.

    They are as few as their attention weights allow.
    """
    return min(AT_ONCE, max(1, ATTENTION_BYTES // (4 * num_heads * length**2)))


def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states among the arguments of a layer or attention module."""
    return args[0] if args else kwargs["hidden_states"]


def entered_by(stream: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the same arguments with other hidden states."""
    return ((stream, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": stream})


def layer_of(model: PreTrainedModel, module: nn.Module) -> nn.Module:
    """Return the decoder layer that holds an attention module."""
    path = next(name for name, candidate in model.named_modules() if candidate is module)
    return model.get_submodule(path.rpartition(".")[0])


class Streams:
    """The hidden states `[B, T, D]` that enter one decoder layer, batch by batch.

    Visit layers in ascending order: those below run once, and only the input of the present one,
    `layer`, is stored. Going back to a lower one starts again from the embeddings.

    Args:
        model: The model.
        modules: The attention module of each layer.
        sequences: `[N, T]` token ids.
        batch_size: Most sequences at once (`batch_of`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Sequence[nn.Module],
        sequences: Tensor,
        batch_size: int,
    ) -> None:
        self.model = model
        self.modules = modules
        self.layers = [layer_of(model, module) for module in modules]
        self.batches: Sequence[Tensor] = sequences.split(batch_of(sequences.shape[1], batch_size))
        self._restart()

    def _restart(self) -> None:
        self.layer = 0
        self._streams: Sequence[Tensor | None] = [None] * len(self.batches)

    @torch.no_grad()
    def advance(self, layer: int, attended: Iterable[Tensor] | None = None) -> None:
        """Bring all batches to the entrance of `layer`, through the layers below as they are now.

        Args:
            attended: What the attention of the present layer puts out for each batch, where that is
                known: it need not run then.
        """
        if layer < self.layer:
            self._restart()
        if layer == self.layer:
            return
        reached: list[Tensor] = []
        present = self.modules[self.layer]
        outputs = iter(attended or ())
        for index, batch in enumerate(self.batches):
            replayed = (
                nullcontext()
                if attended is None
                else _shadowed([present], _giving(next(outputs), None))
            )
            with self.entering(index), replayed:
                reached.append(
                    run_to(self.model, self.layers[layer], batch, through=False).stream.clone()
                )
        self.layer = layer
        self._streams = reached

    @contextmanager
    def entering(self, index: int) -> Iterator[None]:
        """Within, a run of the model on batch `index` begins at the layer that was advanced to."""
        stream = self._streams[index]
        if stream is None:
            yield
            return

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
            return entered_by(stream, args, kwargs)

        hook = self.layers[self.layer].register_forward_pre_hook(enter, with_kwargs=True)
        try:
            with _shadowed(
                self.layers[: self.layer], lambda hidden_states, *args, **kwargs: hidden_states
            ):
                yield
        finally:
            hook.remove()


@contextmanager
def _shadowed(modules: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Within, `forward` stands for the modules' own.

    It is shadowed on the instances only, and shown again after.
    """
    for module in modules:
        module.forward = forward
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _giving(*output: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: output


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode without gradients, and restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
