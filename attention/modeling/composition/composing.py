"""Dynamically composable heads (Xiao 2024): every score becomes a mix of the scores of all heads.

Legend: B batch, H query heads in n groups of h, R rank, D model dim, T query tokens, S key tokens,
d head dim, G^K kept key heads; A `[B, H, T, S]` are scores before softmax or weights after it.

Composition acts on the scores of the H query heads, however many key and value heads are kept. The
weights of one side of one place are packed in `[B, T, H(2R+1)]`: that is what the cache stores of
the key side.

Settings have the fields of `attention.plan.Composition`. This file and `scores.py` need torch
alone: an export for transformers has copies of them (`attention.io.targets.transformers`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.modeling.scores import softmax_beside

# Silent in the paper. At its initialisation the mean square is smaller than this, which damps the
# first steps.
NORM_EPSILON = 1e-6


def head_norm(x: Tensor) -> Tensor:
    """RMS norm over the last axis without a scale (Xiao 2024, Eq. 5), in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + NORM_EPSILON).rsqrt()).to(x.dtype)


def low_rank(scores_BnhXY: Tensor, down_BXnRh: Tensor, up_BXnRh: Tensor) -> Tensor:
    """H -> R -> H with separate weights for every position of X (Xiao 2024, Eq. 7, App. D)."""
    inner = torch.einsum("bnhxy,bxnrh->bnrxy", scores_BnhXY, down_BXnRh)
    return torch.einsum("bnrxy,bxnrh->bnhxy", inner, up_BXnRh)


def _fill(parameter: Tensor, std: float, generator: torch.Generator | None) -> None:
    """Fill with normal numbers of the generator's device, so that a seed gives the same on each."""
    drawn = parameter
    if generator is not None:
        drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=generator.device)
    parameter.copy_(drawn.normal_(std=std, generator=generator))


def _unpack(
    weights: Tensor, heads: int, groups: int, rank: int
) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """`[B, X, H(2R+1)]` -> (down, up) `[B, X, n, R, h]` each, and the gate `[B, X, H]`.

    Of width 2HR there is no gate, of width H no projection (None): the width determines which are
    present.
    """
    low = heads * rank
    width = weights.shape[-1]
    gate = weights[..., width - heads :] if width != 2 * low else None
    if width == heads:
        return None, gate
    down, up = weights[..., : 2 * low].unflatten(-1, (2, groups, rank, heads // groups)).unbind(-4)
    return (down, up), gate


def compose(
    scores: Tensor,
    query_weights: Tensor | None,
    key_weights: Tensor | None,
    base: Tensor | None = None,
    *,
    groups: int = 1,
    rank: int = 2,
) -> Tensor:
    """Return scores composed across heads by static, query-side and key-side weights.

    This is a + low rank and gate of the query side + low rank and gate of the key side (Xiao 2024,
    Eq. 7). It is linear in the scores, position by position: a zero stays a zero.

    Args:
        scores: `[B, H, T, S]`.
        query_weights: `[B, T, H(2R+1)]`, packed, or None without that side; narrower without
            projection or gate (see `_unpack`).
        key_weights: `[B, S, H(2R+1)]`, as `query_weights`.
        base: `[n, h, h]`, replaces the skip.
        groups: Heads are composed within so many groups.
        rank: R.
    """
    grouped = scores.unflatten(1, (groups, -1))
    out = grouped if base is None else torch.einsum("bnhts,nhk->bnkts", grouped, base)
    gates: Tensor | float = 0.0
    if query_weights is not None:
        projection, gate = _unpack(query_weights, scores.shape[1], groups, rank)
        if projection is not None:
            out = out + low_rank(grouped, *projection)
        if gate is not None:
            gates = gates + gate.transpose(1, 2).unsqueeze(-1)
    out = out.flatten(1, 2)
    if key_weights is not None:
        projection, gate = _unpack(key_weights, scores.shape[1], groups, rank)
        if projection is not None:
            out = out + low_rank(grouped.transpose(-1, -2), *projection).transpose(-1, -2).flatten(
                1, 2
            )
        if gate is not None:
            gates = gates + gate.transpose(1, 2).unsqueeze(-2)
    return out if isinstance(gates, float) else out + scores * gates


class DynamicWeights(nn.Module):
    """The weights that one side of one place computes for its tokens (Xiao 2024, Eq. 5 and 6).

    `[B, X, D]` -> `[B, X, H(2R+1)]`.

    dw = gelu(x W_1) W_2, split in two of `[R, h]` per group, the first normed over heads; gate =
    tanh(x W_g). Each group is a separate Compose (sec. 3.2): `w_1 [D, n, 2hR]`, `w_2 [n, 2hR,
    2hR]`, `w_gate [D, H]`. Without the projection there is no w_1 and no w_2, without the gate no
    w_gate (Table 9), and accordingly fewer weights.
    """

    w_1: nn.Parameter | None
    w_2: nn.Parameter | None
    w_gate: nn.Parameter | None

    def __init__(self, num_heads: int, hidden_size: int, settings: Any) -> None:
        super().__init__()
        self.groups = settings.groups
        self.rank = settings.rank
        self.group_heads = num_heads // settings.groups
        inner = 2 * self.group_heads * self.rank
        self.w_1 = self.w_2 = self.w_gate = None
        if settings.projection:
            self.w_1 = nn.Parameter(torch.empty(hidden_size, self.groups, inner))
            self.w_2 = nn.Parameter(torch.empty(self.groups, inner, inner))
        if settings.gate:
            self.w_gate = nn.Parameter(torch.empty(hidden_size, num_heads))
        self.reset()

    @torch.no_grad()
    def reset(self, *, identity: bool = False, generator: torch.Generator | None = None) -> None:
        """Initialise as in the paper (sec. 4).

        With h for H where heads are composed in groups (silent).

        With all of W_2 zero both factors of the low-rank product would be zero, and so would the
        gradients of both, for ever: for an identity only one half of it is.

        Args:
            identity: The gates and the half of W_2 that makes the way up are zero, so that compose
            changes nothing.
            generator: For the random numbers.
        """
        h = self.group_heads
        rank = self.rank
        if self.w_1 is not None and self.w_2 is not None:
            hidden, _, inner = self.w_1.shape
            _fill(self.w_1, math.sqrt(2 / (hidden + inner)), generator)
            _fill(self.w_2, 0.02 / (math.sqrt(2 * h * rank) * (h + rank)), generator)
            if identity:
                self.w_2[..., inner // 2 :].zero_()
        if self.w_gate is not None:
            _fill(self.w_gate, 0.05 * math.sqrt(2 / (self.w_gate.shape[0] + h)), generator)
            if identity:
                self.w_gate.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Attention inputs `[B, X, D]` -> packed weights `[B, X, H(2R+1)]`.

        Returns down, then up, then gates, each of all groups.
        """
        parts = []
        if self.w_1 is not None and self.w_2 is not None:
            hidden = F.gelu((x @ self.w_1.flatten(1)).unflatten(-1, self.w_1.shape[1:]))
            down, up = torch.einsum("bxni,nij->bxnj", hidden, self.w_2).chunk(2, dim=-1)
            down = head_norm(down.unflatten(-1, (self.rank, self.group_heads)))
            parts += [down.flatten(2), up.flatten(2)]
        if self.w_gate is not None:
            parts.append(torch.tanh(x @ self.w_gate))
        return torch.cat(parts, dim=-1)


class Compose(nn.Module):
    """One compose function (Xiao 2024, Eq. 3 and 7) with its parameters.

    Extra parameters: a side has `D 2RH + (2RH)^2 / n` for the projection and `D H` for the gate;
    the static base `H^2 / n`.
    """

    def __init__(self, num_heads: int, hidden_size: int, settings: Any) -> None:
        super().__init__()
        if num_heads % settings.groups:
            raise ValueError(
                f"composition: groups must divide the {num_heads} heads, got {settings.groups}"
            )
        self.groups = settings.groups
        self.rank = settings.rank
        self.query = (
            DynamicWeights(num_heads, hidden_size, settings) if settings.query_side else None
        )
        self.key = DynamicWeights(num_heads, hidden_size, settings) if settings.key_side else None
        size = num_heads // settings.groups
        self.base = (
            nn.Parameter(torch.empty(settings.groups, size, size)) if settings.static_base else None
        )
        self.reset()

    @torch.no_grad()
    def reset(self, *, identity: bool = False, generator: torch.Generator | None = None) -> None:
        """Initialise the static base.

        Xavier normal as the rest (Xiao 2024, sec. 4), or the unit matrix.
        """
        if self.base is not None:
            if identity:
                self.base.copy_(
                    torch.eye(self.base.shape[-1], device=self.base.device, dtype=self.base.dtype)
                )
            else:
                _fill(self.base, math.sqrt(1 / self.base.shape[-1]), generator)

    def key_weights(self, x: Tensor) -> Tensor | None:
        """Return what the cache keeps of the tokens `x [B, S, D]`, as `[B, S, H(2R+1)]`.

        None without a key side.
        """
        return None if self.key is None else self.key(x)

    def forward(self, scores: Tensor, x_query: Tensor, key_weights: Tensor | None = None) -> Tensor:
        """Return the composed scores.

        Args:
            scores: `[B, H, T, S]`.
            x_query: `[B, T, D]`.
            key_weights: `[B, S, H(2R+1)]` from `key_weights`.
        """
        query_weights = None if self.query is None else self.query(x_query)
        return compose(
            scores, query_weights, key_weights, self.base, groups=self.groups, rank=self.rank
        )


class QueryKeyNorm(nn.Module):
    """QKNorm (Xiao 2024, sec. 4.2, after Dehghani 2023).

    See `Composition` for what the paper leaves open.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_heads))

    @torch.no_grad()
    def reset(self, *, identity: bool = False, generator: torch.Generator | None = None) -> None:
        self.scale.fill_(1.0)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise queries `[B, H, T, d]` and keys `[B, G^K, S, d]`.

        Their root mean squares become the scale, and 1.
        """
        return head_norm(query) * self.scale[:, None, None], head_norm(key)


class HeadComposition(nn.Module):
    """The composition of one attention layer.

    Before and after softmax, window (0: none), norm of queries and keys.
    """

    def __init__(self, num_heads: int, hidden_size: int, settings: Any, window: int) -> None:
        super().__init__()
        self.window = window
        self.before = Compose(num_heads, hidden_size, settings) if settings.before_softmax else None
        self.after = Compose(num_heads, hidden_size, settings) if settings.after_softmax else None
        self.norm = QueryKeyNorm(num_heads) if settings.qk_norm else None

    @property
    def places(self) -> list[Compose]:
        """The compose functions that are on, in order of use."""
        return [module for module in (self.before, self.after) if module is not None]

    def key_weights(self, x: Tensor) -> Tensor | None:
        """Return the key-side weights of new tokens as they are cached, or None if there are none.

        Returns:
            `[B, T, places H(2R+1)]`.
        """
        weights = [w for module in self.places if (w := module.key_weights(x)) is not None]
        return torch.cat(weights, dim=-1) if weights else None

    def forward(
        self,
        scores: Tensor,
        x: Tensor,
        key_weights: Tensor | None,
        mask: Tensor | None,
        dropout: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Composed attention weights from scaled scores (Xiao 2024, Eq. 4 and App. D).

        scores `[B, H, T, S]`; x `[B, T, D]`: the attention input of the T query tokens, which are
        the last of the S; key_weights: of all S tokens, from `key_weights`; mask broadcastable to
        the scores, boolean (True: seen) or additive, None: causal; sinks `[H]` take part in the
        softmax. The mask comes after the first compose and cuts out what it hides exactly.
        """
        halves = iter(() if key_weights is None else key_weights.chunk(len(self.places), dim=-1))
        if self.before is not None:
            scores = self.before(scores, x, next(halves, None))
        weights = softmax_beside(
            masked(scores, mask, self.window), None if sinks is None else sinks[:, None]
        )
        if self.after is not None:
            weights = self.after(weights, x, next(halves, None))
        return F.dropout(weights, dropout, training=dropout > 0)


def masked(scores: Tensor, mask: Tensor | None, window: int = 0) -> Tensor:
    """Scores `[B, H, T, S]` under a mask and a window (0: none).

    The T query tokens are the last of the S.

    Hidden scores become the lowest finite number: a row that sees nothing (padding) stays finite.
    """
    T, S = scores.shape[-2:]
    lowest = torch.finfo(scores.dtype).min
    distance = torch.arange(S - T, S, device=scores.device)[:, None] - torch.arange(
        S, device=scores.device
    )
    visible = distance < window if window else None
    if mask is None:
        visible = (distance >= 0) if visible is None else visible & (distance >= 0)
    elif mask.dtype == torch.bool:
        visible = mask if visible is None else mask & visible
    else:
        scores = (scores + mask).clamp(min=lowest)
    return scores if visible is None else scores.masked_fill(~visible, lowest)
