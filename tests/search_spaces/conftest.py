"""A planning context of the demo checkpoint, calibrated on a little of the standard library's source."""

from __future__ import annotations

import argparse
import ast
import inspect

import numpy as np
import pytest
import torch

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import lift
from attention.families import geometry_of
from search_spaces.planning.planner import PlanningContext


@pytest.fixture(scope="session")
def demo_context(demo_model, demo_tokenizer) -> PlanningContext:
    """8 sequences of 128 tokens for calibration, 2 others for whole-model scores."""
    text = "\n".join(inspect.getsource(module) for module in (argparse, ast))
    tokens = torch.tensor(demo_tokenizer(text)["input_ids"][: 10 * 128]).view(10, 128)
    calibration = calibrate(demo_model, tokens[:8])
    geometry = geometry_of(demo_model.config)
    return PlanningContext(geometry, lift(demo_model), calibration, demo_model, tokens[8:])


@pytest.fixture
def make_context(tiny_model):
    """`make_context(family, **config)`: a context of a tiny random model, calibrated on random tokens."""

    def make(family: str = "llama", *, seed: int = 0, **config: int) -> PlanningContext:
        model = tiny_model(family, seed=seed, **config)
        tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, 64, (4, 24)))
        calibration = calibrate(model, tokens)
        return PlanningContext(geometry_of(model.config), lift(model), calibration, model, tokens[:2])

    return make
