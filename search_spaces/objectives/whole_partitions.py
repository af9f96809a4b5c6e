"""Objectives that score whole partitions, by the layer's output or the loss of the model."""

from __future__ import annotations

from attention.axes import Knob
from search_spaces.axes import OBJECTIVE
from search_spaces.scores import LayerOutputScore, ModelScore
from search_spaces.site import Site


@OBJECTIVE.part(
    "layer",
    source=(
        "ours: stands in for the whole-model score of AsymGQA (linearity of projections and RoPE)"
    ),
    knobs=(
        Knob("tokens", "int", "calibration tokens that a partition is scored on", low=1),
        Knob("length", "int", "tokens of a sequence that are used, from its start", low=1),
    ),
    needs=("statistics", "inputs", "model", "whole_partition"),
)
def layer(site: Site, *, tokens: int = 2048, length: int = 512) -> LayerOutputScore:
    """Score by the relative squared error of the layer's attention output.

    The score is minus that error when the site's heads are mean-pooled.
    """
    return LayerOutputScore.from_site(site, tokens=tokens, length=length)


@OBJECTIVE.part(
    "model", source="Chen 2024 (AsymGQA), sec. 2.1", needs=("model", "measure", "whole_partition")
)
def model(site: Site) -> ModelScore:
    """Score by the loss of the model converted with this partition and those of the sites before.

    The score is minus that loss.
    """
    if site.plan_with is None or site.measure is None:
        raise ValueError("objective=model needs a model and token sequences to measure the loss on")
    return ModelScore(site.plan_with, site.measure)
