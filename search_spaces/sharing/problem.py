"""What is shared among layers: the question and its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attention.axes import Knob
from attention.heads import LayerHeads
from attention.mlp import MlpWeights
from attention.plan import HeadShare
from search_spaces.sharing.matching import match_blocks, match_heads


@dataclass(frozen=True)
class SharingProblem:
    """`heads`: lifted, one entry a layer. `mlps()` reads the MLP of every layer, if it is asked for."""

    heads: Sequence[LayerHeads]
    mlps: Callable[[], Sequence[MlpWeights]]


@dataclass(frozen=True)
class Sharing:
    """Shared heads and shared MLP blocks, each sorted and resolved to roots, as a plan takes them."""

    shares: tuple[HeadShare, ...] = ()
    mlp_shares: tuple[HeadShare, ...] = ()


# At most half: more than a two-layer model can share, of which the first layer has no earlier one.
KNOBS = (
    Knob("alpha", "float", 0.3, "part of all heads that use the weights of another", low=0.05, high=0.5, searched=True),
    Knob("mlp", "bool", False, "share the same part of the MLP, in as many blocks as there are heads"),
)


def match(problem: SharingProblem, alpha: float, mlp: bool) -> Sharing:
    """The best α·L·H matches of heads, and of MLP blocks if `mlp`."""
    blocks = match_blocks(problem.mlps(), problem.heads[0].num_heads, alpha) if mlp else ()
    return Sharing(match_heads(problem.heads, alpha), blocks)
