"""Composed heads (Xiao 2024) against the plain transformer: a training step, a forward pass, and decoding.

The paper's Table 6 has 74 to 89 % of the transformer's training speed and 88 to 95 % of its inference speed, on
accelerators and with larger models. `rival / ours` is that share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from attention.conversion.convert import build
from attention.modeling.composition import reset
from attention.modeling.growing_cache import cache_argument
from attention.plan import AttentionPlan, Composition
from benchmarks.conversion import training_step
from benchmarks.models import DEMO, llama, tokens
from benchmarks.report import Row, Scale, benchmark, medians

KINDS = {"transformer": None, "dcformer": Composition(), "query side only": Composition(key_side=False)}
PAPER = {"training step": "the paper: 0.74 to 0.89", "prefill": "the paper: 0.88 to 0.95", "decoding": "the same"}


@benchmark("composition")
def composition(scale: Scale) -> Iterator[Row]:
    """Dynamically composed heads against plain attention: training step, prefill, decoding."""
    layers = scale.pick(1, 4)
    batch = tokens(*scale.pick((2, 16), (8, 256))).to(scale.device)
    plain = AttentionPlan.identity(layers, 8, 32)
    works: dict[str, Callable[[], object]] = {}
    for kind, settings in KINDS.items():
        model: Any = build(llama(layers, DEMO), replace(plain, composition=settings))
        model.to(scale.device)
        reset(model, identity=False, generator=torch.Generator(scale.device).manual_seed(0))
        works[f"prefill {kind}"] = _without_gradient(lambda m=model: m(batch, use_cache=False))
        works[f"decoding {kind}"] = _without_gradient(lambda m=model: _decode(m, batch, scale.pick(2, 16)))
        works[f"training step {kind}"] = training_step(model, batch)
    times = medians(works, scale.pick(1, 4), scale.device)
    for what, paper in PAPER.items():
        for kind in KINDS:
            if kind != "transformer":
                yield Row(f"{what}, {kind}", times[f"{what} {kind}"], times[f"{what} transformer"], "s", paper)


def _without_gradient(work: Callable[[], object]) -> Callable[[], object]:
    return torch.no_grad()(work)


def _decode(model: Any, batch: torch.Tensor, new: int) -> None:
    """Read half of the batch's tokens at once and `new` more one by one."""
    half = batch.shape[1] // 2
    cache = model(batch[:, :half], use_cache=True).past_key_values
    for t in range(half, half + new):
        model(batch[:, t : t + 1], **cache_argument(model, cache), use_cache=True)
