"""PostShare: matched heads are trained towards each other before they share (paper 004, section PostShare).

The plan is DirectShare's. What differs is training: until the heads are shared, a penalty pulls each pair together.
"""

from __future__ import annotations

from typing import Any

from search_spaces.axes import SHARING
from search_spaces.sharing.problem import KNOBS, Sharing, SharingProblem, match


@SHARING.part("post", source="Cao 2024 (paper 004), PostShare: the matches of DirectShare", knobs=KNOBS)
def post(problem: SharingProblem, **knobs: Any) -> Sharing:
    return match(problem, **knobs)
