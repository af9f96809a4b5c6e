"""Every layer owns its weights."""

from __future__ import annotations

from search_spaces.axes import SHARING
from search_spaces.sharing.problem import Sharing, SharingProblem


@SHARING.part("none", source="the checkpoint as it is")
def none(problem: SharingProblem) -> Sharing:
    return Sharing()
