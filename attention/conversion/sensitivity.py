"""Measure how much the loss increases by a small error in the output of one attention layer.

To second order, an error e_t at token t costs 1/2 e_t^T F e_t nats (the KL divergence from the
original's predictions), where F = E[g g^T] is the Fisher information: g is the gradient, with
respect to the attention's output at a token, of the summed loss of the tokens that follow, each of
them drawn from what the model itself predicts there (Amari 1998, sec. 3; as K-FAC, Martens 2015,
sec. 2, does with the layers of a network). Errors at different tokens are taken to be unrelated,
and F to be the same at all of them. One backward pass of some thousand tokens gives F for all
layers.

Legend: L layers, B sequences, T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from attention.base.draws import draw_categories
from attention.base.progress import stage
from attention.families import family_of
from attention.modeling.losses import language_modelling
from attention.modeling.predictions import Final, final, in_chunks, positions_at_once
from attention.modeling.running import batch_of, layer_of

SENSITIVITY_BATCH = 2  # sequences at once, at most


def output_metrics(model: PreTrainedModel, sequences: Tensor, *, seed: int = 0) -> list[Tensor]:
    """F of each layer, `[D, D]` in float32, from the tokens of `sequences` `[N, T]`.

    Nats per token over squared outputs.

    The counted predictions are those of T - 1 tokens of each sequence. Only the input of each layer
    is stored for the backward pass, which recomputes the rest.

    Raises:
        ValueError: For sequences of one token.
    """
    check_predicts(sequences)
    modules = list(family_of(model.config).attention_modules(model))
    generator = torch.Generator().manual_seed(seed)
    sums = SummedGradients(modules)
    entered: list[Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda _, __, out: entered.append(out.requires_grad_())
    )
    try:
        layers = [layer_of(model, module) for module in modules]
        counting = stage("sensitivity of the outputs", len(sequences), "sequences")
        with counting as progress, sums.collected(), _recomputed(layers), torch.enable_grad():
            for ids in sequences.split(batch_of(sequences.shape[1], SENSITIVITY_BATCH)):
                cost = drawn_cost(final(model, ids.to(model.device)), generator)
                torch.autograd.grad(cost, entered.pop())
                progress.step(len(ids))
    finally:
        hook.remove()
    return [sums.of[module] / sequences.numel() for module in modules]


def check_predicts(sequences: Tensor) -> None:
    """Raise ValueError if no token of `sequences` `[N, T]` comes after another."""
    if sequences.shape[1] < 2:
        raise ValueError(
            f"a next token is needed: expected sequences of at least 2 tokens, got "
            f"{sequences.shape[1]}"
        )


def drawn_cost(predicted: Final, generator: torch.Generator) -> Tensor:
    """Return the summed loss of next tokens drawn from the predictions.

    It has gradients to the states.
    """
    labels = _drawn(predicted, generator)
    return in_chunks(predicted, labels, language_modelling) * labels[:, 1:].numel()


def expected_cost(metric: Tensor, errors: Iterable[Tensor]) -> float:
    """Mean of 1/2 e^T F e over the tokens of all `errors` `[B, T, D]`: nats per token."""
    total = torch.zeros((), dtype=torch.float64)
    tokens = 0
    for rows in (error.flatten(0, 1) for error in errors):
        total = total + (rows @ metric * rows).sum(dtype=torch.float64)
        tokens += len(rows)
    return float(total) / 2 / tokens


@torch.no_grad()
def _drawn(predicted: Final, generator: torch.Generator) -> Tensor:
    """Token ids `[B, T]`, that at t + 1 drawn from the prediction at t; the first is 0."""
    states = predicted.states[:, :-1].flatten(0, 1)
    drawn = [
        draw_categories(predicted.head(part).float().softmax(-1), generator)
        for part in states.split(positions_at_once(predicted.vocabulary))
    ]
    ids = torch.cat(drawn).view(len(predicted.states), -1)
    return torch.cat([torch.zeros_like(ids[:, :1]), ids], 1)


class SummedGradients:
    """Sums of g g^T `[D, D]` in float32 of each attention module, over all tokens.

    They grow in backward passes while they are `collected`.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.of: dict[nn.Module, Any] = dict.fromkeys(modules, 0.0)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect gradients at the attention modules while the body runs."""

        def watch(module: nn.Module, _: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._add(module, gradient))

        hooks = [module.register_forward_hook(watch) for module in self.of]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _add(self, module: nn.Module, gradient: Tensor) -> None:
        rows = gradient.flatten(0, 1).float()
        self.of[module] = self.of[module] + rows.T @ rows


@contextmanager
def _recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Within, layers keep what enters them for the backward pass, and are run again in it."""
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
