"""gpt-oss: each query head has a sink, a logit beside its scores.

The head dim is a field of its own; layers with a window and layers without take turns; the MLPs are
mixtures of experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from attention.families import _separate
from attention.geometry import HeadGeometry
from attention.heads import LayerHeads


def read(module: Any, geometry: HeadGeometry) -> LayerHeads:
    return replace(_separate.read(module, geometry), sinks=module.sinks.detach())


@torch.no_grad()
def write(module: Any, heads: LayerHeads) -> None:
    _separate.write(module, heads)
    if heads.sinks is not None:
        module.sinks.copy_(heads.sinks)


FAMILY = _separate.family("gpt_oss", GptOssConfig, GptOssForCausalLM, read=read, write=write)
