"""Ways to let heads of later layers use the weights of earlier ones: one file a part.

A part is `f(problem: SharingProblem, **knobs) -> Sharing`. Sharing saves weights and optimiser state, not KV cache.
"""

from search_spaces.axes import SHARING
from search_spaces.sharing.matching import Match, best_matches, match_blocks, match_heads, share_count, similarities
from search_spaces.sharing.problem import Sharing, SharingProblem

__all__ = [
    "SHARING",
    "Match",
    "Sharing",
    "SharingProblem",
    "best_matches",
    "match_blocks",
    "match_heads",
    "share_count",
    "similarities",
]
