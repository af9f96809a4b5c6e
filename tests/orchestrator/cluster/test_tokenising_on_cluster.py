"""Tokenising by Ray tasks: the same set as by one process, in flat memory, killed half way or not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import ray
import yaml
from ray.autoscaler._private.resource_demand_scheduler import _default_utilization_scorer, get_nodes_for

from benchmarks.needs.texts import LENGTH, MEGA, process, result, write_text
from orchestrator.cluster import tokenising
from orchestrator.cluster.ray_internals import cluster_status, pending_bundles
from orchestrator.cluster.tokenising import tokenise_on_cluster, tokeniser
from trainers.text.corpora import DataError
from trainers.text.data import SMALL_TEXT, TextCut, token_set
from trainers.text.token_sets import is_complete, read_sequences
from trainers.text.tokenising import tokenise_here

REPOSITORY = Path(__file__).resolve().parents[3]
FEW, MANY = 20_000_000, 100_000_000


def wait_for_a_cpu() -> None:
    """Wait until the tasks of earlier tests have left the cluster."""
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < 1 and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.extended
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


def test_no_task_waits_for_a_cpu_that_is_not_there(
    ray_cluster: None, demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else Ray's autoscaler starts nodes with GPUs where it has no others (`cluster.yaml`), for a text that one
    process reads."""
    gate = tmp_path / "gate"

    def wait(texts: list[str], model: str) -> list[str]:
        while not gate.exists():
            time.sleep(0.1)
        return texts

    def read() -> Iterator[list[str]]:
        for number in range(12):
            blocks.append(number)
            yield [str(number)]

    wait_for_a_cpu()
    blocks: list[int] = []
    monkeypatch.setattr(tokenising, "_tokenise", wait)
    tokenised: list[Any] = []
    thread = Thread(target=lambda: tokenised.extend(tokenise_on_cluster(str(demo_dir))(read(), None)))
    thread.start()
    time.sleep(3)
    demand = [dict(bundle) for count, bundle in pending_bundles(cluster_status()) for _ in range(count)]
    gate.touch()
    thread.join(60)
    assert tokenised == [[str(number)] for number in range(12)] == [[str(number)] for number in blocks]
    types = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())["available_node_types"]
    nodes, _ = get_nodes_for(types, {"head": 1}, "head", 6, demand, _default_utilization_scorer)
    assert not nodes, f"for {demand}"


def test_what_a_user_can_mend_in_a_text_is_said_without_ray_s_trace(
    ray_cluster: None, demo_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(texts: list[str], model: str) -> list[str]:
        raise DataError(f"the chat template refuses {texts[0]}")

    monkeypatch.setattr(tokenising, "_tokenise", refuse)
    wait_for_a_cpu()  # without one this process tokenises
    with pytest.raises(DataError) as caught:
        list(tokenise_on_cluster(str(demo_dir))(iter([["this record"]] * 3), None))
    assert str(caught.value) == "the chat template refuses this record"


def test_a_small_text_waits_for_no_processes(demo_dir: Path) -> None:
    assert tokeniser(str(demo_dir), SMALL_TEXT) is tokenise_here
    assert tokeniser(str(demo_dir), SMALL_TEXT + 1) is not tokenise_here


@pytest.mark.extended
def test_a_hundred_million_tokens_in_flat_memory_killed_half_way(demo_tokenizer: Any, tmp_path: Path) -> None:
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
    remaining = sorted(folder.glob("0*.safetensors"))
    assert 5 <= len(remaining) < 48 and not is_complete(folder)
    # The newest may have been killed before its record, and is then written again; all recorded ones stay
    recorded = json.loads((folder / "unfinished.json").read_text())["shards"]
    finished = [folder / f"{int(number):05}.safetensors" for number in recorded]
    assert set(remaining[:-1]) <= set(finished) <= set(remaining)
    stamps = [file.stat().st_mtime_ns for file in finished]

    large = result(process("make", str(source), MANY, str(cache)))
    assert [file.stat().st_mtime_ns for file in finished] == stamps
    assert large["digest"] == read_sequences(alone).digest
    began = time.perf_counter()
    assert token_set(cut, demo_tokenizer, cache) == folder
    assert time.perf_counter() - began < 1

    small = result(process("make", str(source), FEW, str(cache)))
    read = [result(process("stream", created["folder"])) for created in (small, large)]
    peaks = {"reads and writes": (small["own"], large["own"]), "tokenises": (small["others"], large["others"])}
    peaks["streams"] = (read[0]["own"], read[1]["own"])
    for what, (few, many) in peaks.items():
        print(f"the process that {what}: {few / MEGA:.0f} MiB for 20M tokens, {many / MEGA:.0f} MiB for 100M")
        # 80M tokens more are 160 MB on disk and 320 MB as int32. The smaller set fills the shuffle buffer twice, since
        # memory grows until the allocators' free lists are those of documents that leave it in any order
        assert many < few + 100 * MEGA, what
