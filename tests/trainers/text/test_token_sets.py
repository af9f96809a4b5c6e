"""Token sets on disk: what is read is what was written, row by row; what is damaged is made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from trainers.text.corpora import DataError
from trainers.text.data import BatchStream
from trainers.text.token_sets import (
    Layout,
    TextPosition,
    TokenSetWriter,
    is_complete,
    read_sequences,
    same_text,
    write_sequences,
)

ROWS, LENGTH = 29, 5


def tokens(rows: int = ROWS, length: int = LENGTH, largest: int = 60_000, seed: int = 0) -> torch.Tensor:
    return torch.randint(largest + 1, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def seven_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets") / "seven"
    write_sequences(tokens(), folder, shard_tokens=4 * LENGTH)
    return folder


@settings(max_examples=40, deadline=None)
@given(data=st.data(), rows=st.integers(1, 20), length=st.integers(2, 7), shard_tokens=st.integers(1, 40))
def test_any_rows_of_any_set_are_those_that_were_written(
    data: st.DataObject, rows: int, length: int, shard_tokens: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    largest = data.draw(st.sampled_from([1, 2**16 - 1, 2**16, 2**31 - 1]))
    written, folder = tokens(rows, length, largest), tmp_path_factory.mktemp("set")
    write_sequences(written, folder, largest_id=largest, shard_tokens=shard_tokens)
    read = read_sequences(folder)
    assert (len(read), read.shape) == (rows, (rows, length))
    assert torch.equal(read[:], written)
    expected = data.draw(st.lists(st.integers(0, rows - 1), max_size=2 * rows))
    assert torch.equal(read[expected], written[expected])
    with safe_open(folder / "00000.safetensors", "numpy") as shard:
        assert shard.get_slice("sequences").get_dtype() == ("U16" if largest < 2**16 else "U32")


@settings(max_examples=60, deadline=None)
@given(
    world=st.sampled_from([1, 2, 3, 4, 8]),
    later=st.sampled_from([1, 2, 3, 4, 8]),
    steps=st.integers(0, 4),
    seed=st.integers(0, 3),
)
def test_every_world_size_sees_one_order_and_resumes_where_another_stopped(
    seven_shards: Path, world: int, later: int, steps: int, seed: int
) -> None:
    def workers(count: int) -> list[BatchStream]:
        read = read_sequences(seven_shards)
        return [BatchStream(read, 24, rank=rank, world_size=count, seed=seed) for rank in range(count)]

    whole = BatchStream(tokens(), 24, seed=seed)  # in memory
    before = workers(world)
    for _ in range(steps):
        assert torch.equal(torch.cat([stream.next() for stream in before]), whole.next())
    states = [stream.state_dict() for stream in before]
    assert states == [{"position": 24 * steps, "seed": seed, "sequences": ROWS}] * world
    after = workers(later)
    for stream in after:
        stream.load_state_dict(states[0])
    for _ in range(3):
        assert torch.equal(torch.cat([stream.next() for stream in after]), whole.next())


def test_the_digest_is_of_the_tokens_and_how_they_are_cut(tmp_path: Path) -> None:
    def digest(name: str, written: torch.Tensor) -> str:
        write_sequences(written, tmp_path / name, made_of={"name": name})
        return read_sequences(tmp_path / name).digest

    first, other = tokens(), tokens()
    other[3, 2] += 1
    assert digest("a", first) == digest("b", first)
    assert len({digest("a", first), digest("c", other), digest("d", first.reshape(LENGTH, ROWS))}) == 3
    assert same_text(tmp_path / "a", str(tmp_path / "b")) and not same_text(tmp_path / "a", tmp_path / "c")
    assert same_text("/gone", "/gone") and not same_text("/gone", tmp_path / "a")


def test_a_set_without_an_index_is_none(tmp_path: Path) -> None:
    layout = Layout.of(4, 2, 9, 4, {})
    writer = TokenSetWriter(tmp_path, layout)
    writer.write(0, np.zeros((2, 2), np.int32), TextPosition(1, 3))
    assert not is_complete(tmp_path)
    with pytest.raises(DataError, match=f"found none at {tmp_path}; build it with token_set"):
        read_sequences(tmp_path)
    again = TokenSetWriter(tmp_path, layout)
    assert (again.missing(), again.start(1)) == ([[1]], TextPosition(1, 3))
    other = TokenSetWriter(tmp_path, Layout.of(4, 2, 9, 4, {"seed": 1}))
    assert other.missing() == [[0, 1]]


@pytest.mark.parametrize("damage", ["gone", "cut short", "changed", "empty"])
def test_a_damaged_shard_of_an_unfinished_set_is_written_again_alone(damage: str, tmp_path: Path) -> None:
    layout = Layout.of(8, 2, 9, 4, {})
    writer = TokenSetWriter(tmp_path, layout)
    for number in range(3):
        writer.write(number, np.full((2, 2), number), TextPosition(number))
    file = tmp_path / "00001.safetensors"
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"cut short": content[:-1], "changed": content[:-1] + b"\1", "empty": b""}[damage])
    again = TokenSetWriter(tmp_path, layout)
    assert (again.missing(), again.start(1)) == ([[1], [3]], TextPosition(0))


def test_a_shard_that_has_gone_is_named_to_the_reader_and_noticed_before(seven_shards: Path, tmp_path: Path) -> None:
    write_sequences(tokens(), tmp_path, shard_tokens=4 * LENGTH)
    read = read_sequences(tmp_path)
    assert is_complete(tmp_path)
    (tmp_path / "00003.safetensors").unlink()
    assert not is_complete(tmp_path)
    assert torch.equal(read[:12], tokens()[:12])
    with pytest.raises(DataError, match=r"00003\.safetensors cannot be read: .*start again"):
        read[:]
    with pytest.raises(IndexError, match="row 29 of 29 sequences"):
        read[[ROWS]]


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token ids must fit uint16, got 65536"):
        write_sequences(torch.full((2, 2), 2**16), tmp_path, largest_id=100)


def test_what_a_full_disk_leaves_is_no_index(tmp_path: Path) -> None:
    write_sequences(tokens(), tmp_path)
    (tmp_path / "index.json").write_text((tmp_path / "index.json").read_text()[:-40])
    assert not is_complete(tmp_path)
