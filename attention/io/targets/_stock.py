"""Folders that transformers reads without help: how they are written and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from attention.io import checkpoint
from attention.io.precision import DTYPES, cast_weights


def write(model: PreTrainedModel, folder: Path, dtype: str, tokenizer: Any = None) -> str:
    cast_weights(model, DTYPES[dtype])
    checkpoint.write_model(model, folder, tokenizer)
    return model.config.model_type


def read(folder: Path, config: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()


def read_with_code(folder: Path, config: Any) -> PreTrainedModel:
    """Read the folder as any user does: its code is the file that `write` has put there."""
    return AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, trust_remote_code=True
    ).eval()
