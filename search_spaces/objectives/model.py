"""Loss of the whole model: the score that the walk's paper uses (there: accuracy)."""

from __future__ import annotations

from search_spaces.axes import OBJECTIVE
from search_spaces.scores import ModelScore
from search_spaces.site import Site


@OBJECTIVE.part("model", source="Chen 2024 (paper 003), sec. 2.1", needs=("model", "measure", "whole_partition"))
def model(site: Site) -> ModelScore:
    """Minus the loss of the model converted with the partition here and what was found at the sites before."""
    if site.plan_with is None or site.measure is None:
        raise ValueError("objective=model needs a model and token sequences to measure the loss on")
    return ModelScore(site.plan_with, site.measure)
