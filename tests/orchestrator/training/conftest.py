"""Fixtures of trainings that verbs and trials make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig


@pytest.fixture(scope="module")
def like(tmp_path_factory: pytest.TempPathFactory, demo_tokenizer: Any) -> Path:
    """An architecture and a tokenizer; no weights."""
    folder = tmp_path_factory.mktemp("like")
    LlamaConfig(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    ).save_pretrained(folder)
    demo_tokenizer.save_pretrained(folder)
    return folder
