"""A training step in each relaxation against the plain step. A new relaxation is measured by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from attention.axes import Part
from attention.plan import AttentionPlan, HeadShare, LayerPlan
from benchmarks.conversion import training_step
from benchmarks.models import DEMO, decoupled_plan, llama, random_model, tokens
from benchmarks.report import Row, Scale, benchmark, medians
from trainers.losses import objective
from trainers.relaxations import RELAXATION_TRAINING
from trainers.relaxations.stage import relaxed_objective


@benchmark("relaxations")
def relaxations(scale: Scale) -> Iterator[Row]:
    """A training step of 8 x 256 tokens in each relaxation against the plain step."""
    layers = scale.pick(2, 4)
    batch = tokens(*scale.pick((2, 16), (8, 256))).to(scale.device)
    works = {"plain": training_step(random_model(llama(layers, DEMO), device=scale.device), batch)}
    works |= {part.name: relaxed_step(part, layers, batch) for part in RELAXATION_TRAINING}
    times = medians(works, scale.pick(1, 5), scale.device)
    for name in works:
        if name != "plain":
            yield Row(name.replace("_", " "), times[name], times["plain"], "s per step")


def relaxed_step(part: Part, layers: int, batch: Tensor) -> Callable[[], None]:
    """Return one step of AdamW half-way through the relaxation, penalty included."""
    model = random_model(llama(layers, DEMO), device=str(batch.device))
    plan = _shared(layers) if "shares" in part.needs else decoupled_plan(layers, 8, 32)
    generator = torch.Generator().manual_seed(0)
    relaxation = part(model, plan, steps=100, generator=generator, **part.settings({}))
    relaxed = relaxation.model.train()
    loss_fn = relaxed_objective(relaxation, objective(), lambda: 50)
    optimiser = torch.optim.AdamW(relaxed.parameters(), lr=1e-4)

    def step() -> None:
        loss_fn(relaxed, batch).backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def _shared(layers: int) -> AttentionPlan:
    """Three heads in ten share the weights of an earlier layer (Cao 2024)."""
    count = max(1, round(0.3 * layers * 8))
    places = [(layer, head) for layer in range(1, layers) for head in range(8)][:count]
    shares = tuple(HeadShare(layer, head, 0, head) for layer, head in places)
    return AttentionPlan((LayerPlan.identity(8),) * layers, 32, shares)
