"""Numbers by hand, and loops as slow references: annealing's acceptance (Alg. 4), greedy allocation (Alg. 5), Eq. 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.allocation.dha import dha_greedy
from search_spaces.costs import PairCost
from search_spaces.grouping.anneal import anneal, swap_search
from search_spaces.similarity.activation import activation_similarity

# Four heads on a line at 0, 1, 10 and 12; the cost of a pair is its distance.
PLACES = np.array([0.0, 1.0, 10.0, 12.0])
DISTANCE = np.abs(PLACES[:, None] - PLACES[None])


class Scripted:
    """Replaces a generator: returns the given integers and random numbers."""

    def __init__(self, integers: list[int], randoms: list[float]) -> None:
        self.left, self.randoms = list(integers), list(randoms)

    def integers(self, high: int, size: int | None = None) -> int | list[int]:
        return self.left.pop(0) if size is None else [self.left.pop(0) for _ in range(size)]

    def random(self) -> float:
        return self.randoms.pop(0)


def swapped(random: float, temperature: float) -> tuple[tuple[tuple[int, ...], ...], float, bool]:
    """One move from ((0, 1), (2, 3)), cost 1 + 2 = 3, that exchanges heads 1 and 2: cost |0 - 10| + |1 - 12| = 21.

    Then a second move, at temperature 0. Returns the best, its cost, and whether the first move was accepted: the
    second one starts from its result.
    """
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    class Watched(PairCost):
        def swap_change(self, group: tuple[int, ...], other: tuple[int, ...], a: int, b: int) -> float:
            seen.append((group, other))
            return super().swap_change(group, other, a, b)

    generator = Scripted([0, 1, 1, 0, 0, 1, 1, 1], [random, 0.5])
    best, cost = swap_search(Watched(DISTANCE), ((0, 1), (2, 3)), [temperature, 0.0], generator)  # type: ignore[arg-type]
    return best, cost, seen[1] != ((0, 1), (2, 3))


def test_alg_4_accepts_a_rise_with_probability_exp_of_minus_rise_over_temperature() -> None:
    chance = math.exp(-18 / 20)  # the rise is 21 - 3, at temperature 20: 0.4066
    assert chance == pytest.approx(0.4066, abs=1e-4)
    assert swapped(chance - 1e-6, 20.0)[2]
    assert not swapped(chance + 1e-6, 20.0)[2]
    assert not swapped(1e-12, 0.0)[2]  # at temperature 0 no increase is accepted
    for random in (0.0, 0.999):  # the best partition visited is returned, whichever moves are accepted
        assert swapped(random, 20.0)[:2] == (((0, 1), (2, 3)), 3.0)


def slow_anneal(distance: np.ndarray, start: list[list[int]], draws: list[tuple[int, int, int, int, float]]) -> float:
    """Alg. 4 for least distance: the whole cost summed anew for every move; `draws` are its random numbers."""

    def total(groups: list[list[int]]) -> float:
        return sum(distance[i, j] for group in groups for i in group for j in group if i < j)

    groups, temperature = [list(g) for g in start], 100.0
    best = total(groups)
    for i, j, a, b, random in draws:
        if temperature <= 0.001:
            break
        if i != j:
            new = [list(g) for g in groups]
            x, y = sorted(groups[i])[a], sorted(groups[j])[b]
            new[i] = [y if h == x else h for h in groups[i]]
            new[j] = [x if h == y else h for h in groups[j]]
            rise = total(new) - total(groups)
            if rise < 0 or random < math.exp(-rise / temperature):
                groups = new
                best = min(best, total(groups))
        temperature *= 0.9
    return best


class Recorder:
    """A generator that keeps what it gives out, move by move."""

    def __init__(self, seed: int) -> None:
        self.inner, self.moves = np.random.default_rng(seed), []

    def permutation(self, *args: object) -> object:
        return self.inner.permutation(*args)  # type: ignore[call-overload]

    def integers(self, high: int, size: int | None = None) -> object:
        result = self.inner.integers(high, size=size)
        if size is None:
            self.moves[-1].append(int(result))
        else:
            self.moves.append([int(x) for x in result])
        return result

    def random(self) -> float:
        self.moves[-1].append(self.inner.random())
        return self.moves[-1][-1]


@pytest.mark.parametrize("seed", range(5))
def test_alg_4_against_loops(seed: int) -> None:
    distance = np.random.default_rng(seed).uniform(0, 60, size=(12, 12))
    distance = distance + distance.T
    recorder = Recorder(seed)
    start = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))
    temperatures = [100 * 0.9**i for i in range(110)]
    best, cost = swap_search(PairCost(distance), start, temperatures, recorder)  # type: ignore[arg-type]
    # A move within one group draws no member; one that lowers the cost may draw no number: any does.
    draws = [(*move, *[0, 0, 0.0][len(move) - 2 :]) for move in recorder.moves]
    assert cost == pytest.approx(slow_anneal(distance, [list(g) for g in start], draws))
    assert cost < sum(distance[i, j] for g in start for i in g for j in g if i < j)
    assert cost == pytest.approx(sum(distance[i, j] for g in best for i in g for j in g if i < j))


def test_annealing_finds_the_clusters_of_a_line() -> None:
    result = anneal(DISTANCE, 4, 2, generator=np.random.default_rng(0))
    assert result.partition == ((0, 1), (2, 3)) and result.score == -3.0


# ---- Alg. 5 ---------------------------------------------------------------------------------------------------


def slow_greedy(losses: list[float], total: int, small: int, large: int, cap: int) -> list[int] | None:
    """Alg. 5 one step at a time, with plain lists; None where heads remain or are too few."""
    given, remaining = [], total
    for _ in losses:
        given.append(small)
        remaining -= small
    if remaining < 0 or small > cap:
        return None
    first = max(range(len(losses)), key=lambda i: (losses[i], -i))
    more = min(large, cap) - small
    if remaining // large >= 1:  # line 10: as many 16's as fit whole, though each takes 12
        given[first] += more
        remaining -= more
    while remaining >= small:
        need = [losses[i] / given[i] if given[i] + small <= cap else -1.0 for i in range(len(losses))]
        if max(need) < 0:
            break
        given[need.index(max(need))] += small
        remaining -= small
    return given if remaining == 0 else None


@settings(max_examples=150, deadline=None)
@given(
    losses=st.lists(st.integers(0, 50), min_size=1, max_size=7),
    total=st.integers(1, 80),
    small=st.integers(1, 4),
    times=st.integers(1, 4),
    cap=st.integers(1, 24),
)
def test_alg_5_against_loops(losses: list[int], total: int, small: int, times: int, cap: int) -> None:
    expected = slow_greedy([float(x) for x in losses], total, small, small * times, cap)
    if expected is None:
        with pytest.raises(ValueError, match="dha allocation"):
            dha_greedy([float(x) for x in losses], total, (small, small * times), cap)
        return
    assert list(dha_greedy([float(x) for x in losses], total, (small, small * times), cap)) == expected


# ---- Eq. 1 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_eq_1_against_loops(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(2, 6, 4, generator=generator)

    def cosine(x: list[float], y: list[float]) -> float:
        return sum(p * q for p, q in zip(x, y, strict=True)) / (math.hypot(*x) * math.hypot(*y))

    rows, others = both.tolist()
    there = sum(max(cosine(x, y) for y in others) for x in rows)
    back = sum(max(cosine(x, y) for x in rows) for y in others)
    assert activation_similarity(both)[0, 1].item() == pytest.approx((there + back) / 2, rel=1e-5)
