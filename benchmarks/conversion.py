"""Time of a conversion: calibration against a forward pass, conversion against a training step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import convert
from attention.conversion.refinement.refine import refine
from benchmarks.models import DEMO, decoupled_plan, llama, random_model, tokens
from benchmarks.report import Row, Scale, benchmark, medians


@benchmark("calibration")
def calibration(scale: Scale) -> Iterator[Row]:
    """Calibration against a plain forward pass over the same tokens."""
    model = random_model(llama(scale.pick(1, 4), DEMO), device=scale.device)
    sequences = tokens(*scale.pick((2, 16), (16, 256)))

    @torch.no_grad()
    def forward() -> None:
        for batch in sequences.split(8):
            model(batch.to(scale.device), use_cache=False)

    works = {
        "ours": lambda: calibrate(model, sequences, sample_tokens=sequences.shape[1]),
        "rival": forward,
    }
    times = medians(works, scale.pick(1, 3), scale.device)
    note = f"{sequences.numel()} tokens, demo width"
    yield Row("moments per head", times["ours"], times["rival"], "s", note)


@benchmark("conversion")
def conversion(scale: Scale) -> Iterator[Row]:
    """Conversion to a quarter of the KV heads against one training step of 8 x 256 tokens."""
    layers = scale.pick(1, 4)
    model = random_model(llama(layers, DEMO), device=scale.device)
    plan = decoupled_plan(layers, 8, 32)
    sequences = tokens(*scale.pick((4, 16), (16, 256)))
    statistics = calibrate(model, sequences, sample_tokens=sequences.shape[1])
    step = training_step(random_model(llama(layers, DEMO), device=scale.device), sequences[:8].to(scale.device))
    works = {
        fusion: lambda fusion=fusion: convert(model, plan, fusion=fusion, calibration=statistics)
        for fusion in ("mean", "least_squares")
    }
    times = medians({**works, "step": step}, scale.pick(1, 3), scale.device)
    for fusion in works:
        yield Row(f"convert, {fusion.replace('_', ' ')}", times[fusion], times["step"], "s", "statistics given")
    converted = convert(model, plan, fusion="least_squares", calibration=statistics)
    settings = {"fit_steps": scale.pick(2, 60)}
    once = medians({"fit": lambda: refine("fit_heal", model, converted, sequences, settings)}, 1, scale.device)
    note = f"{settings['fit_steps']} Adam steps per layer, {sequences.numel()} tokens"
    yield Row("local fit and heal", once["fit"], times["step"], "s", note)


def training_step(model: PreTrainedModel, batch: Tensor):
    """A function that trains `model` one step of AdamW on `batch` `[N, T]`."""
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(batch, labels=batch, use_cache=False).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step
