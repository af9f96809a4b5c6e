"""Calibrations that several files here share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention.calibration.calibrate import calibrate
from attention.calibration.store import Calibration
from trainers.text.data import load_sequences


@pytest.fixture(scope="session")
def demo_tokens(demo_tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """16k calibration tokens of the corpus that the demo checkpoint was trained on, `[64, 256]`."""
    return load_sequences("stdlib", demo_tokenizer, split="calibration", tokens=16_384, sequence_length=256)


@pytest.fixture(scope="session")
def demo_held_out(demo_tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """8k held-out tokens of that corpus, `[32, 256]`."""
    return load_sequences("stdlib", demo_tokenizer, split="eval", tokens=8_192, sequence_length=256)


@pytest.fixture(scope="session")
def demo_calibration(demo_model: PreTrainedModel, demo_tokens: Tensor) -> Calibration:
    return calibrate(demo_model, demo_tokens)


@pytest.fixture(scope="session")
def tiny_tokens() -> Tensor:
    """Random tokens for the tiny models, `[12, 24]`."""
    return torch.randint(0, 64, (12, 24), generator=torch.Generator().manual_seed(5))
