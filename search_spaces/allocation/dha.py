"""Greedy allocation by layer loss. Legend: L layers, T total heads of one side."""

from __future__ import annotations

from collections.abc import Sequence

from attention.axes import Knob
from search_spaces.allocation.problem import AllocationProblem, Counts
from search_spaces.axes import ALLOCATION


def dha_greedy(
    losses: Sequence[float],
    total: int,
    quanta: tuple[int, int] = (4, 16),
    cap: int | None = None,
    *,
    first: int = 1,
) -> tuple[int, ...]:
    """Heads for each layer, `total` in all, more where the loss is greater (DHA, App. B.4, Alg. 5).

    `quanta` (small, large): every layer starts with `small`; the `first` layers of greatest loss
    are raised to `large`, but as printed only as many as whole `large` fit into the remaining
    budget (line 10: R // 16, though each takes 12); then `small` more goes to the layer of greatest
    loss / heads until the budget is used up. Ties go to the earlier layer. No layer gets more than
    `cap` heads (default: no limit).

    Raises:
        ValueError: If the total is too small, cannot be given out in steps of `small`, or exceeds
            the cap.
    """
    small, large = quanta
    layers = len(losses)
    limit = total if cap is None else cap
    if layers < 1 or small < 1 or large < small or first < 0 or min(losses) < 0:
        raise ValueError(
            f"dha allocation needs layers, losses of at least 0 and 1 <= small <= large, got "
            f"{layers} layers, "
            f"quanta {quanta}, losses {list(losses)}"
        )
    if not small * layers <= total or small > limit:
        raise ValueError(
            f"dha allocation gives {layers} layers at least {small} heads each (cap {limit}), more "
            f"than the total "
            f"{total}; lower the small quantum"
        )
    counts = [small] * layers
    remaining = total - small * layers
    raised = min(large, limit)
    for layer in sorted(range(layers), key=lambda i: (-losses[i], i))[
        : min(first, remaining // large)
    ]:
        counts[layer] = raised
        remaining = remaining - (raised - small)
    while remaining >= small:
        open_layers = [i for i in range(layers) if counts[i] + small <= limit]
        if not open_layers:
            break
        layer = max(open_layers, key=lambda i: (losses[i] / counts[i], -i))
        counts[layer] += small
        remaining -= small
    if remaining:
        raise ValueError(
            f"dha allocation has {remaining} of {total} heads left that no layer can take "
            f"in steps of {small} up to {limit}; choose a total that fits {layers} layers"
        )
    return tuple(counts)


@ALLOCATION.part(
    "dha",
    source="Chen 2024 (DHA), App. B.4, Alg. 5",
    knobs=(
        Knob(
            "small",
            "int",
            "heads that every layer has, and the step; 0: an eighth of the heads",
            low=0,
        ),
        Knob("large", "int", "heads of the layers of greatest loss; 0: half of the heads", low=0),
        Knob("first", "int", "how many layers are raised to `large` at once", low=0),
        Knob(
            "key_share",
            "float",
            "share of all heads that are keys, the rest are values",
            low=0.05,
            high=0.95,
        ),
    ),
    needs=("group_cost", "apart", "by_layer", "any_count"),
)
def dha(
    problem: AllocationProblem,
    *,
    small: int = 0,
    large: int = 0,
    first: int = 1,
    key_share: float = 0.5,
) -> Counts:
    """Greedy, once for keys and once for values (DHA, sec. 3.2 and 4.3).

    `key_share` of the total goes to keys, with what is no whole head. **Silent** in the paper is
    the split of the total.

    The default quanta are the paper's 4 and 16 of 32 heads in proportion, less where the total or
    the heads ask for it.

    Raises:
        ValueError: If a side has fewer heads than layers, or more than the checkpoint.
    """
    if problem.loss is None:
        raise ValueError(
            "allocation=dha needs a loss for each layer; choose an objective with a group cost"
        )
    values = int(problem.total * (1 - key_share) + 1e-9)
    least = problem.num_layers
    most = problem.num_layers * problem.stored
    sides: list[tuple[int, ...]] = []
    for side, total in (("key", problem.total - values), ("value", values)):
        if not least <= total <= most:
            raise ValueError(
                f"allocation.key_share {key_share:g} of {problem.total} heads gives {total} {side} "
                f"heads, expected "
                f"{least} to {most} for {problem.num_layers} layers; choose a share nearer to 0.5"
            )
        step = small or _step(problem, total)
        quanta = (step, large or max(step, problem.stored // 2 // step * step))
        losses = [problem.loss(layer, side) for layer in range(problem.num_layers)]
        sides.append(dha_greedy(losses, total, quanta, problem.stored, first=first))
    return tuple(zip(*sides, strict=True))


def _step(problem: AllocationProblem, total: int) -> int:
    """Return the largest step, at most an eighth of the heads, that every layer can take.

    It divides heads and total.
    """
    steps = range(1, max(1, problem.stored // 8) + 1)
    return max(
        s
        for s in steps
        if total % s == 0 and problem.stored % s == 0 and s * problem.num_layers <= total
    )
