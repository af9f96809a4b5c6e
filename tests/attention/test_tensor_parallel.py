"""The KV cache on each GPU of a tensor-parallel engine, against a simulation of the ranks and by its properties."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.io.targets import EngineSupport
from attention.tensor_parallel import RankLayoutError, fits_ranks, heads_per_rank, layers_per_rank

RANKS = (1, 2, 3, 4, 6, 8, 16)
COUNTS = range(1, 33)
layouts = st.tuples(st.sampled_from(RANKS), st.lists(st.sampled_from(COUNTS), min_size=1, max_size=5)).filter(
    lambda layout: all(fits_ranks(count, layout[0]) for count in layout[1])
)


def simulated(kv_heads: int, ranks: int) -> list[set[int]]:
    """KV heads that the queries of each rank read, where ranks take equal, contiguous parts of the queries."""
    queries = kv_heads * ranks
    each = queries // ranks
    return [{query * kv_heads // queries for query in range(rank * each, (rank + 1) * each)} for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "kv_heads"), list(itertools.product(RANKS, COUNTS)))
def test_a_rank_holds_the_heads_that_its_queries_read(ranks: int, kv_heads: int) -> None:
    cached = simulated(kv_heads, ranks)
    if fits_ranks(kv_heads, ranks):
        assert {len(heads) for heads in cached} == {heads_per_rank(kv_heads, ranks)}
    else:  # some rank would read two heads, or parts of them
        with pytest.raises(RankLayoutError, match=f"{kv_heads} KV heads cannot be divided among {ranks} GPUs"):
            heads_per_rank(kv_heads, ranks)
        assert sum(map(len, cached)) != max(kv_heads, ranks)


@given(layouts)
def test_all_gpus_together_hold_the_whole_and_more_only_with_copies(layout: tuple[int, list[int]]) -> None:
    ranks, counts = layout
    cache = EngineSupport.of(counts, 64).rank_cache(ranks, "bfloat16")
    together = ranks * cache.kv_bytes_per_token_per_gpu
    assert cache.kv_bytes_per_token == 2 * 64 * 2 * sum(counts)
    assert together >= cache.kv_bytes_per_token
    assert (together == cache.kv_bytes_per_token) == (cache.replicated_layers == 0)
    assert cache.replicated_layers == sum(count < ranks for count in counts)


@given(layouts, st.sampled_from(RANKS))
def test_more_gpus_never_hold_more_each(layout: tuple[int, list[int]], more: int) -> None:
    ranks, counts = layout
    if more >= ranks and all(fits_ranks(count, more) for count in counts):
        fewer = zip(layers_per_rank(counts, more), layers_per_rank(counts, ranks), strict=True)
        assert all(one <= other for one, other in fewer)


def test_from_8_to_4_heads_on_8_gpus_saves_nothing_and_says_so() -> None:
    original, half = EngineSupport.of([8] * 32, 128), EngineSupport.of([4] * 32, 128)
    cache = half.rank_cache(8, "bfloat16", original)
    assert cache.kv_bytes_per_token_per_gpu == cache.kv_bytes_per_token_per_gpu_original == 32 * 2 * 128 * 2
    assert "saves nothing" in cache.note
    two = half.rank_cache(2, "bfloat16", original)
    assert two.kv_bytes_per_token_per_gpu == 32 * 2 * 2 * 128 * 2
    assert "50% of the original's" in two.note
    assert "copies" not in two.note


def test_wide_heads_on_as_many_gpus_as_there_were_heads_take_more_than_before() -> None:
    """8 heads of 128 on 8 GPUs: one on each. 2 heads of 256 are half of the bytes, and a copy of one on each GPU."""
    wide, original = EngineSupport.of([2] * 32, 256), EngineSupport.of([8] * 32, 128)
    cache = wide.rank_cache(8, "bfloat16", original)
    assert cache.kv_bytes_per_token_per_gpu == 32_768
    assert "on each of 8 GPUs 32,768 KV bytes per token, 16,384 before: this saves nothing there" in cache.note
    assert "50% of the original's" in wide.rank_cache(2, "bfloat16", original).note


def test_copies_are_counted_in_words() -> None:
    cache = EngineSupport.of([8, 2], 128).rank_cache(4, "float16", EngineSupport.of([8, 8], 128))
    assert cache.kv_bytes_per_token_per_gpu == (2 + 1) * 2 * 128 * 2
    assert "in 1 layer(s) GPUs hold copies of a KV head" in cache.note


def test_a_layer_or_query_heads_that_cannot_be_divided_are_named() -> None:
    with pytest.raises(RankLayoutError, match="layer 3: 3 KV heads cannot be divided among 2 GPUs.*2 or 4 KV heads"):
        EngineSupport.of([4, 2, 1, 3], 64).on_rank(2)
    with pytest.raises(RankLayoutError, match="9 query heads cannot be divided among 2 GPUs"):
        EngineSupport.of([4], 64).on_rank(2, num_heads=9)
    assert EngineSupport.of([4], 64, query_heads=[16]).on_rank(4).query_heads == (4,)
