"""Fronts of points that are to be small in every objective.

Ranks, which points to keep, hypervolume.

Legend: n points, m objectives; `values` [n, m], every entry finite. Point a dominates b if it is
nowhere larger and somewhere smaller.

Points are kept in the order of NSGA-II (Deb 2002, sec. III): by rank; inside the rank that does not
fit in whole by crowding distance (sec. III-B), or by an epsilon-net, which adds the point farthest
from those already chosen (Schmucker 2021, sec. 3.2). Where the papers are silent: ties go to the
earlier point; the epsilon-net starts at the point that is smallest in the first objective;
objectives are scaled to the range of the points of that rank.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import numpy as np

TIES = ("crowding", "epsilon_net")
FEW = 8
"""Points up to which a loop is faster than arrays."""


def ranks(values: Sequence[Sequence[float]]) -> list[int]:
    """Return the rank of each point: 0 on the front, 1 on the front of the others, and so on.

    O(n log n) for one or two objectives (Jensen 2003, sec. III), O(m n^2) for more.
    """
    if any(len(point) > 2 for point in values):
        return _ranks_by_pairs(np.asarray(values, dtype=float))
    order = sorted(range(len(values)), key=lambda i: tuple(values[i]))
    levels = [0] * len(values)
    lowest: list[float] = []
    previous = None
    for i in order:
        if previous is not None and tuple(values[i]) == tuple(values[previous]):
            levels[i] = levels[previous]
            continue
        # Points are sorted by the first objective, so that the last objective alone decides which
        # ranks dominate this one: those whose lowest point is not above it. Lowest points increase
        # with the rank.
        last = values[i][-1]
        rank = bisect.bisect_right(lowest, last)
        lowest[rank : rank + 1] = [last]
        levels[i] = rank
        previous = i
    return levels


def _ranks_by_pairs(points: np.ndarray) -> list[int]:
    """Return `ranks` of points `[n, m]`.

    Each point is compared with all that come before it in lexicographic order.
    """
    order = np.lexsort(points.T[::-1])
    points, levels = points[order], np.zeros(len(points), dtype=int)
    for i, point in enumerate(points):
        before = points[:i]
        above = (before <= point).all(1) & (before < point).any(1)
        levels[i] = levels[:i][above].max(initial=-1) + 1
    result = np.empty_like(levels)
    result[order] = levels
    return result.tolist()


def crowding(values: Sequence[Sequence[float]]) -> list[float]:
    """Crowding distance of each point of one rank.

    The sum over objectives of the gap between its two neighbours.

    Gaps are shares of the objective's range; the ends of each objective are infinitely far from the
    crowd.
    """
    points = np.asarray(values, dtype=float)
    distance = np.zeros(len(points))
    for column in points.T:
        order = np.argsort(column, kind="stable")
        spread = column[order[-1]] - column[order[0]]
        distance[order[[0, -1]]] = np.inf
        if spread > 0:
            distance[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / spread
    return distance.tolist()


def epsilon_net(values: Sequence[Sequence[float]], count: int) -> list[int]:
    """Return `count` of the points, each the farthest from those before it.

    Distances are Euclidean, in shares of the ranges.
    """
    if len(values) <= FEW:
        return _net_of_few(values, count)
    points = np.asarray(values, dtype=float)
    spread = np.ptp(points, axis=0)
    points = (points - points.min(0)) / np.where(spread > 0, spread, 1.0)
    chosen = [int(np.lexsort(points.T[::-1])[0])]
    nearest = np.full(len(points), np.inf)
    while len(chosen) < min(count, len(points)):
        nearest = np.minimum(nearest, np.linalg.norm(points - points[chosen[-1]], axis=1))
        nearest[chosen] = -1.0
        chosen.append(int(nearest.argmax()))
    return chosen[:count]


def _net_of_few(values: Sequence[Sequence[float]], count: int) -> list[int]:
    """`epsilon_net` without arrays.

    With few different KV bytes a rung of thousands has hundreds of ranks of few.
    """
    columns = [
        (min(column), max(column) - min(column) or 1.0) for column in zip(*values, strict=True)
    ]
    points = [
        [(x - low) / spread for x, (low, spread) in zip(point, columns, strict=True)]
        for point in values
    ]
    remaining = sorted(range(len(points)), key=points.__getitem__)
    chosen = remaining[:1]
    remaining = sorted(remaining[1:])
    while remaining and len(chosen) < count:
        farthest = max(
            remaining, key=lambda i: min(math.dist(points[i], points[t]) for t in chosen)
        )
        remaining.remove(farthest)
        chosen.append(farthest)
    return chosen[:count]


def select_best(values: Sequence[Sequence[float]], count: int, ties: str = "crowding") -> list[int]:
    """Return the indices of the `count` points to keep, best first.

    Raises:
        ValueError: For an unknown rule for ties.
    """
    if ties not in TIES:
        raise ValueError(f"ties must be one of {', '.join(TIES)}, got {ties!r}")
    by_rank: dict[int, list[int]] = {}
    for index, rank in enumerate(ranks(values)):
        by_rank.setdefault(rank, []).append(index)
    selected: list[int] = []
    for rank in range(len(by_rank)):
        room = count - len(selected)
        front = by_rank[rank]
        if room <= 0:
            break
        front_values = [values[i] for i in front]
        if ties == "epsilon_net":
            order = epsilon_net(front_values, min(room, len(front)))
        else:
            distance = crowding(front_values)
            order = sorted(range(len(front)), key=lambda position: -distance[position])[:room]
        selected += [front[position] for position in order]
    return selected


def hypervolume(values: Sequence[Sequence[float]], reference: Sequence[float]) -> float:
    """Return the area that two-objective points dominate, up to `reference`.

    Points beyond it add nothing. Zitzler 1999: the larger, the better the front.

    Raises:
        ValueError: For other than two objectives.
    """
    if len(reference) != 2:
        raise ValueError(
            f"the hypervolume is that of two objectives, got a reference with {len(reference)}"
        )
    right, above = reference
    area = 0.0
    lowest = above
    for x, y in sorted((float(x), float(y)) for x, y in values if x < right and y < above):
        if y < lowest:
            area += (right - x) * (lowest - y)
            lowest = y
    return area if math.isfinite(area) else math.inf
