"""Text of the corpus that the demo checkpoint was trained on."""

from __future__ import annotations

import pytest
from arms import BATCH, LENGTH, Corpus
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attention.calibration.calibrate import calibrate
from attention.calibration.store import Calibration
from trainers.text.data import load_sequences


@pytest.fixture(scope="session")
def corpus(demo_tokenizer: PreTrainedTokenizerBase) -> Corpus:
    def read(split: str, tokens: int) -> Tensor:
        return load_sequences("stdlib", demo_tokenizer, split=split, tokens=tokens, sequence_length=LENGTH)

    return Corpus(read("train", 200 * BATCH * LENGTH), read("calibration", 16_384), read("eval", 6_144))


@pytest.fixture(scope="session")
def calibration(demo_model: PreTrainedModel, corpus: Corpus) -> Calibration:
    return calibrate(demo_model, corpus.calibration)
