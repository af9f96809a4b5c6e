"""The stream of batches: workers share a step without overlap, epochs are complete, resuming is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.text.data import BatchStream


def rows(count: int) -> torch.Tensor:
    return torch.arange(count * 3, dtype=torch.int32).view(count, 3)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 23), share=st.integers(1, 4), world=st.integers(1, 4), seed=st.integers(0, 5))
def test_all_workers_together_see_what_one_worker_sees(count: int, share: int, world: int, seed: int) -> None:
    batch = share * world
    one = BatchStream(rows(count), batch, seed=seed)
    many = [BatchStream(rows(count), batch, rank=r, world_size=world, seed=seed) for r in range(world)]
    for _ in range(7):
        whole, parts = one.next(), [stream.next() for stream in many]
        assert all(len(part) == share for part in parts)
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("count", "batch"), [(12, 4), (10, 4), (3, 8)])
def test_every_epoch_holds_every_sequence_once_in_a_new_order(count: int, batch: int) -> None:
    stream = BatchStream(rows(count), batch)
    seen = torch.cat([stream.next() for _ in range(3 * count)])[:, 0].div(3, rounding_mode="floor").tolist()
    epochs = [seen[i : i + count] for i in range(0, 3 * count, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_resuming_is_exact_also_with_other_workers(world: int) -> None:
    stream = BatchStream(rows(10), 4, seed=7)
    for _ in range(6):
        stream.next()
    state = stream.state_dict()
    resumed = [BatchStream(rows(10), 4, rank=r, world_size=world, seed=7) for r in range(world)]
    for part in resumed:
        part.load_state_dict(state)
    for _ in range(6):
        assert torch.equal(stream.next(), torch.cat([part.next() for part in resumed]))


def test_seed_changes_the_order() -> None:
    assert not torch.equal(BatchStream(rows(50), 50, seed=0).next(), BatchStream(rows(50), 50, seed=1).next())


def test_misuse_is_refused() -> None:
    state = BatchStream(rows(10), 4).state_dict()
    with pytest.raises(ValueError, match="sequences must be 11"):
        BatchStream(rows(11), 4).load_state_dict(state)
    with pytest.raises(ValueError, match="seed must be 1"):
        BatchStream(rows(10), 4, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"each of 5 worker\(s\) a sequence, got 4"):
        BatchStream(rows(10), 4, world_size=5)
    with pytest.raises(ValueError, match="at least one row"):
        BatchStream(torch.empty(0, 4), 4)
