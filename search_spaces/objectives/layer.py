"""Error of one layer's attention output: the cheap score of a walk."""

from __future__ import annotations

from attention.axes import Knob
from search_spaces.axes import OBJECTIVE
from search_spaces.scores import LayerOutputScore
from search_spaces.site import Site


@OBJECTIVE.part(
    "layer",
    source="ours: stands in for the whole-model score of paper 003 (linearity of projections and RoPE)",
    knobs=(
        Knob("tokens", "int", "calibration tokens that a partition is scored on", low=1),
        Knob("length", "int", "tokens of a sequence that are used, from its start", low=1),
    ),
    needs=("statistics", "model", "whole_partition"),
)
def layer(site: Site, *, tokens: int = 2048, length: int = 512) -> LayerOutputScore:
    """Minus the relative squared error of the layer's attention output when the site's heads are mean-pooled."""
    return LayerOutputScore.from_site(site, tokens=tokens, length=length)
