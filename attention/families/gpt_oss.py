"""gpt-oss: each query head has a sink, an additional logit in its softmax.

The config has a field for the head dim; layers with and without a window alternate; the MLPs are
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
