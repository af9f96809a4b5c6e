"""DirectShare: matched heads share weights at once, without training (paper 004, Alg. 1)."""

from __future__ import annotations

from typing import Any

from search_spaces.axes import SHARING
from search_spaces.sharing.problem import KNOBS, Sharing, SharingProblem, match


@SHARING.part("direct", source="Cao 2024 (paper 004), Eq. 3 and Alg. 1", knobs=KNOBS)
def direct(problem: SharingProblem, **knobs: Any) -> Sharing:
    return match(problem, **knobs)
