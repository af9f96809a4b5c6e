"""Exact grouping against brute force, and how long grouping takes for many heads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import lift
from attention.conversion.fusion.costs import KeyCost, ValueCost
from attention.families import geometry_of
from benchmarks.models import llama, random_model, tokens
from benchmarks.report import Row, Scale, benchmark, medians
from search_spaces.costs import GroupCost, PairCost
from search_spaces.grouping.exact import exact
from search_spaces.grouping.merge_anneal import merge_anneal
from search_spaces.grouping.problem import GroupingProblem
from search_spaces.grouping.subsets import exact_partition


@benchmark("grouping", devices=("cpu",))
def grouping(scale: Scale) -> Iterator[Row]:
    """Exact grouping by the subset programme against trying all partitions."""
    for heads in scale.pick((5,), (8, 10)):
        pairs = np.abs(np.random.default_rng(heads).normal(size=(heads, heads)))
        pairs = pairs + pairs.T
        scores: dict[str, dict[int, float]] = {}

        def ours(pairs: np.ndarray = pairs, heads: int = heads, scores: dict = scores) -> None:
            scores["ours"] = {g: -float(p.score or 0.0) for g, p in exact_partition(pairs, heads).items()}

        def brute(pairs: np.ndarray = pairs, scores: dict = scores) -> None:
            scores["brute"] = brute_force(pairs)

        times = medians({"ours": ours, "brute": brute}, scale.pick(1, 2), repeat={"ours": scale.pick(1, 3)})
        if any(abs(scores["ours"][g] - cost) > 1e-9 for g, cost in scores["brute"].items()):
            raise RuntimeError(f"the exact grouping of {heads} heads is not the cheapest: {scores}")
        yield Row(f"{heads} heads, all numbers of groups", 1e3 * times["ours"], 1e3 * times["brute"], "ms")
    yield _every_count(scale)
    yield from _many_heads(scale)


def _every_count(scale: Scale) -> Row:
    """Group as for a measured curve: one number of groups after the other, of one site."""
    heads = scale.pick(6, 16)
    pairs = np.abs(np.random.default_rng(0).normal(size=(heads, heads)))
    counts = range(2, heads)

    def together() -> list[float]:
        cost, generator = PairCost(pairs), np.random.default_rng(0)
        problems = [GroupingProblem(heads, count, objective=cost) for count in counts]
        return [exact(problem, generator, equal_sizes=False).score or 0.0 for problem in problems]

    def apart() -> list[float]:
        return [exact_partition(pairs, heads, groups=[count])[count].score or 0.0 for count in counts]

    if not np.allclose(together(), apart()):
        raise RuntimeError("one programme for all counts and one for each do not find the same")
    times = medians({"ours": together, "apart": apart}, 1)
    note = "rival: a separate programme for each"
    return Row(f"{heads} heads, one count after the other", 1e3 * times["ours"], 1e3 * times["apart"], "ms", note)


def _many_heads(scale: Scale) -> Iterator[Row]:
    """Above the exact limit: merging and annealing on the costs of least-squares fusion."""
    heads, dim, width = scale.pick((6, 4, 24), (32, 32, 256))
    shape = {"num_attention_heads": heads, "head_dim": dim, "intermediate_size": 64, "vocab_size": 64}
    model = random_model(llama(1, shape, hidden_size=width))
    statistics = calibrate(model, tokens(4, scale.pick(8, 256), 64)).layers[0]
    geometry = geometry_of(model.config)
    for side, kind in (("key", KeyCost), ("value", ValueCost)):
        price = kind(lift(model)[0], statistics, geometry)

        def work(price: KeyCost | ValueCost = price) -> None:
            cost = GroupCost(price.cost, lambda groups: price.costs(groups).numpy())
            problem = GroupingProblem(heads, heads // 4 or 1, objective=cost)
            merge_anneal(problem, np.random.default_rng(0), equal_sizes=False)

        times = medians({"ours": work}, 1)["ours"]
        yield Row(f"{heads} {side} heads of {dim} into {heads // 4 or 1}", times, None, "s", "at most 30 s, one core")


def brute_force(pairs: np.ndarray) -> dict[int, float]:
    """Least cost of a partition into G groups, for each G, by trying every partition.

    As fast as trying all can be: the cost grows with each head that is placed, so nothing is summed twice.
    """
    distances, heads = pairs.tolist(), len(pairs)
    least: dict[int, float] = {}
    groups: list[list[int]] = []

    def place(head: int, cost: float) -> None:
        if head == heads:
            least[len(groups)] = min(cost, least.get(len(groups), cost))
            return
        row = distances[head]
        for group in groups:
            added = sum(row[other] for other in group)
            group.append(head)
            place(head + 1, cost + added)
            group.pop()
        groups.append([head])
        place(head + 1, cost)
        groups.pop()

    place(0, 0.0)
    return least
