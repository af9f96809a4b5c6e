"""Sharing of weights among layers: the problem, its solution, and the parts (Cao 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attention.axes import Knob
from attention.heads import LayerHeads
from attention.modeling.mlp import MlpWeights
from attention.plan import HeadShare
from search_spaces.axes import SHARING
from search_spaces.sharing.matching import match_blocks, match_heads

Shares = dict[str, tuple[HeadShare, ...]]
"""Shared heads and shared MLP blocks by field of a plan, each sorted and resolved to roots."""
MATCHES = ("qk", "q", "k", "v", "qkv", "apart")


@dataclass(frozen=True)
class SharingProblem:
    """What sharing between layers is chosen by.

    `heads` are lifted, one entry per layer; `mlps()` reads the MLP of every layer, if it is used.
    """

    heads: Sequence[LayerHeads]
    mlps: Callable[[], Sequence[MlpWeights]]


_KNOBS = (
    # At most half: more than a two-layer model can share, of which the first layer has no earlier
    # one.
    Knob(
        "alpha",
        "float",
        "part of all heads that use the weights of another",
        low=0.05,
        high=0.5,
        searched=True,
    ),
    Knob("mlp", "bool", "share the same part of the MLP, in as many blocks as there are heads"),
    Knob(
        "match",
        "choice",
        "weights by which heads are matched; apart: each projection by itself",
        choices=MATCHES,
    ),
    Knob(
        "output",
        "bool",
        "share the head's columns of the output projection too (the paper's 90.4 %)",
    ),
)


@SHARING.part("none", source="the checkpoint as it is")
def none(problem: SharingProblem) -> Shares:
    """Every layer owns its weights."""
    return {}


# The plan is the same. "post" trains the heads towards each other first: a penalty pulls each pair
# together.
@SHARING.part("post", source="Cao 2024, PostShare: the matches of DirectShare", knobs=_KNOBS)
@SHARING.part("direct", source="Cao 2024, Eq. 3 and Alg. 1", knobs=_KNOBS)
def match(
    problem: SharingProblem,
    *,
    alpha: float = 0.3,
    mlp: bool = False,
    match: str = "qk",
    output: bool = False,
) -> Shares:
    """Return the best α·L·H matches of heads, and of MLP blocks if `mlp`.

    Args:
        match: One of the six functions of the paper's ablation ("Head-wise Matching Functions"):
            W_q, W_k, W_v, each projection by itself ("apart"), W_q ‖ W_k ‖ W_v, and W_q ‖ W_k, its
            own.
        output: **silent** is by what an output projection is matched; it follows the head's match,
            and that of its values where projections are matched apart.
    """
    blocks = match_blocks(problem.mlps(), problem.heads[0].num_heads, alpha) if mlp else ()
    if match == "apart":
        q, k, of_output = (match_heads(problem.heads, alpha, side) for side in "qkv")
        shares = {"query_shares": q, "key_shares": k, "value_shares": of_output}
    else:
        of_output = match_heads(problem.heads, alpha, match)
        shares = {"shares": of_output}
    return shares | {"mlp_shares": blocks, "output_shares": of_output if output else ()}
