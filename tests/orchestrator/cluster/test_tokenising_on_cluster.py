"""Tokenising by Ray tasks: the same set as by one process, in flat memory, killed half way or not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.needs.texts import LENGTH, MEGA, process, result, write_text
from orchestrator.cluster.tokenising import tokenise_on_cluster, tokeniser
from trainers.text.data import SMALL_TEXT, TextCut, token_set
from trainers.text.token_sets import is_complete, read_sequences
from trainers.text.tokenising import tokenise_here

FEW, MANY = 2_000_000, 20_000_000


@pytest.mark.slow
def test_tasks_make_the_set_that_one_process_makes(
    ray_cluster: None, demo_dir: Path, demo_tokenizer: Any, tmp_path: Path
) -> None:
    write_text(tmp_path / "text.jsonl", 1)
    cut = TextCut(str(tmp_path / "text.jsonl"), "train", 160_000, 64, seed=1)
    alone = token_set(cut, demo_tokenizer, tmp_path / "alone", shard_tokens=40_000)
    tasks = tokenise_on_cluster(str(demo_dir))
    together = token_set(cut, demo_tokenizer, tmp_path / "together", shard_tokens=40_000, tokenise=tasks)
    assert len(list(together.glob("*.safetensors"))) == 4
    assert read_sequences(together).digest == read_sequences(alone).digest


def test_a_small_text_waits_for_no_processes(demo_dir: Path) -> None:
    assert tokeniser(str(demo_dir), SMALL_TEXT) is tokenise_here
    assert tokeniser(str(demo_dir), SMALL_TEXT + 1) is not tokenise_here


@pytest.mark.extended
def test_twenty_million_tokens_in_flat_memory_killed_half_way(demo_tokenizer: Any, tmp_path: Path) -> None:
    source = tmp_path / "text.jsonl"
    write_text(source, 4e-6 * MANY)
    cut = TextCut(str(source), "train", MANY, LENGTH)
    alone = token_set(cut, demo_tokenizer, tmp_path / "alone")
    cache = tmp_path / "together"
    folder = cut.folder(demo_tokenizer, cache)

    first, deadline = process("make", str(source), MANY, str(cache)), time.monotonic() + 300
    while not (folder / "00004.safetensors").exists() and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    first.kill()
    first.wait()
    left = sorted(folder.glob("0*.safetensors"))
    assert 5 <= len(left) < 10 and not is_complete(folder)
    stamps = [file.stat().st_mtime_ns for file in left]

    large = result(process("make", str(source), MANY, str(cache)))
    assert [file.stat().st_mtime_ns for file in left] == stamps
    assert large["digest"] == read_sequences(alone).digest
    began = time.perf_counter()
    assert token_set(cut, demo_tokenizer, cache) == folder
    assert time.perf_counter() - began < 1

    small = result(process("make", str(source), FEW, str(cache)))
    read = [result(process("stream", made["folder"])) for made in (small, large)]
    peaks = {"reads and writes": (small["own"], large["own"]), "tokenises": (small["others"], large["others"])}
    peaks["streams"] = (read[0]["own"], read[1]["own"])
    for what, (few, many) in peaks.items():
        print(f"the process that {what}: {few / MEGA:.0f} MiB for 2M tokens, {many / MEGA:.0f} MiB for 20M")
        assert many < few + 60 * MEGA, what  # 18M tokens more are 36 MB on disk and 600 MB as Python's integers
