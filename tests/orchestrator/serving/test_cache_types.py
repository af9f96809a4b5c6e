"""`headfold evaluate --engine ENGINE --cache-types`: losses are our runtime's, bytes those of the formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import run_here
from engine_plans import together
from transformers import PreTrainedModel

from attention.cache_formats import CachePair
from attention.conversion.convert import convert
from attention.engine_cache import engine_cache
from attention.io import checkpoint
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan
from orchestrator import checkpoints
from orchestrator.serving import cache_types, speed, vllm
from trainers.evaluation import evaluate
from trainers.text.data import Texts

CLOSE = 0.02
"""Nats between the mean losses of llama.cpp and of our runtime on the same tokens: single tokens differ by 0.05 at most
(root mean square, `test_engine_caches.py`)."""
ONE, FOUR = (0,) * 8, (0, 0, 1, 1, 2, 2, 3, 3)
TYPES = ("f16", "q8_0", "q8_0,q4_0", "q4_0")


@pytest.fixture(scope="module")
def converted(demo_model: PreTrainedModel, demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint with 4, 1, 4 and 1 KV heads."""
    folder = tmp_path_factory.mktemp("converted") / "model"
    checkpoint.save(convert(demo_model, AttentionPlan(together(FOUR, ONE, FOUR, ONE), 32)), folder, demo_dir)
    return folder


def test_each_format_has_the_losses_of_our_runtime_and_its_bytes(
    converted: Path, demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "ROUNDS", 1)
    options = ["--cache-types", "q8_0,q8_0/q4_0,q4_0", "--original", demo_dir, "--dtype", "float32", "--data", "stdlib"]
    options += ["--eval-tokens", "192", "--sequence-length", "64", "--cache-memory", "2", "--speed-tokens", "4"]
    file = tmp_path / "record.json"
    assert run_here("evaluate", converted, "--engine", "llama.cpp", *options, "--json", file) == 0
    record = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert record["left_out_tokens"] == 0 and record["eval_tokens"] == 3 * 63 and record["context_length"] == 64

    opened = {"original": checkpoints.open_checkpoint(demo_dir), "checkpoint": checkpoints.open_checkpoint(converted)}
    cut = Texts("stdlib").load(opened["original"].tokenizer, 512, eval_tokens=192, sequence_length=64, calibrate=False)
    rows = {(row["model"], row["cache_format"]): row for row in record["cache_types"]}
    assert list(rows) == [(model, name) for model in opened for name in TYPES], "16 bits without having been named"
    whole = {}
    for key, source in opened.items():
        model = checkpoints.load_model(source)
        for name in TYPES:
            row, pair = rows[key, name], CachePair.parse(name)
            with engine_cache(model, pair):
                ours = evaluate(model, cut.held_out).loss
            whole[key, name] = ours
            assert row["loss"] == pytest.approx(ours, abs=CLOSE), (key, name)
            assert row["loss_increase"] == pytest.approx(ours - whole["original", "f16"], abs=2 * CLOSE)
            cached = pair.bytes_per_token(plan_of(model))
            assert row["kv_bytes_per_token"] == cached and f"{cached:,}" in printed
            assert row["share"] == pytest.approx(cached / (2 * 4 * 8 * 32 * 2))
            assert row["sequences"] == 2 * 2**30 // cached // 64
            assert row["prefill_tokens_per_second"] > 0 and row["decode_tokens_per_second"] > 0
    # Fewer heads cost this untrained model far more than the tolerance: the two models were not mixed up.
    assert whole["checkpoint", "f16"] - whole["original", "f16"] > 10 * CLOSE


def test_no_speed_is_measured_if_nothing_is_to_be_decoded(
    demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache_types, "rounds", lambda *_: pytest.fail("it was timed"))
    options = ["--cache-types", "q8_0", "--data", "stdlib", "--eval-tokens", "64", "--sequence-length", "32"]
    file = tmp_path / "record.json"
    assert run_here("evaluate", demo_dir, "--engine", "llama.cpp", *options, "--speed-tokens", "0", "--json", file) == 0
    rows = json.loads(file.read_text())["cache_types"]
    assert [row["kv_bytes_per_token"] for row in rows] == [4096, 2176]
    assert not any("decode_tokens_per_second" in row for row in rows)
    assert "tokens/s" not in capsys.readouterr().out


def test_vllm_is_asked_for_its_own_choice_and_for_fp8(
    demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[dict[str, Any]] = []

    def answer(name: str, command: Sequence[str], request: dict[str, Any], *_: object) -> tuple[dict[str, Any], str]:
        requests.append(request)
        loss, size = {"auto": (2.0, 4096), "fp8": (2.25, 2048)}[request["cache_dtype"]]
        answers: dict[str, Any] = {"version": "vLLM 0", "capacity": 10, "cache_bytes": 10 * size}
        if "sequences" in request:
            return answers | {"scores": [[-loss] * 31 for _ in request["sequences"]], "device": "cpu"}, ""
        return answers | {"seconds": [[(1.0, 1.0)] * request["repetitions"]]}, ""

    monkeypatch.setattr(vllm, "has_module", lambda *_: True)
    monkeypatch.setattr(vllm, "run_child", answer)
    monkeypatch.setattr(speed, "ROUNDS", 1)
    options = ["--cache-types", "fp8", "--data", "stdlib", "--eval-tokens", "64", "--sequence-length", "32"]
    file = tmp_path / "record.json"
    assert run_here("evaluate", demo_dir, "--engine", "vllm", *options, "--speed-tokens", "4", "--json", file) == 0
    record = json.loads(file.read_text())
    assert [request["cache_dtype"] for request in requests] == ["auto", "fp8"] * 2
    assert requests[0]["cells"] == 32 and "repetitions" not in requests[0]
    rows = record["cache_types"]
    assert [(row["cache_format"], row["loss_increase"], row["share"]) for row in rows] == [
        ("auto", 0, 1),
        ("fp8", 0.25, 0.5),
    ]
    assert [row["sequences"] for row in rows] == [2**30 // 4096 // 64, 2**30 // 2048 // 64]
    assert all("decode_tokens_per_second" in row for row in rows)
    printed = capsys.readouterr().out
    assert "rounds fp8 toward zero on a CPU" in printed and "relative to the checkpoint in auto" in " ".join(
        printed.split()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "transformers", "--cache-types", "f16"], "take --engine llama.cpp"),
        (["--engine", "vllm", "--cache-types", "auto,q8_0"], "vLLM has no cache in q8_0"),
        (["--cache-types", "q8_0", "--cache-format", "q4_0"], "leave out --cache-format"),
        (["--cache-types", "q9"], "cache_types: expected one of"),
        (["--cache-types", "q8_0,q4_0,q8_0"], "q8_0 is listed twice"),
        (["--engine", "llama.cpp", "--cache-types", "f16,fp8"], "llama.cpp has no cache in fp8"),
        (["--engine", "llama.cpp", "--cache-types", "f16,q8_0,q8_0,q4_0"], "q8_0 is listed twice"),
        (["--engine", "llama.cpp", "--cache-types", "f16,f16"], "f16 is listed twice"),
        (["--engine", "llama.cpp", "--cache-types", "q2"], "expected one of f16"),
        (["--engine", "llama.cpp", "--cache-types", "q8_0", "--context-lengths", "64,128"], "takes one context length"),
        (["--engine", "llama.cpp", "--cache-types", "q8_0", "--speed-tokens", "1"], "at least 2 tokens to decode"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_work(
    options: list[str],
    message: str,
    demo_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_types, "exported", lambda *_: pytest.fail("it was exported"))
    assert run_here("evaluate", demo_dir, "--eval-tokens", "64", "--sequence-length", "32", *options) == 2
    assert message in capsys.readouterr().err


def test_an_export_is_refused_with_what_to_give(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("export", converted, "--target", "gguf", "--out", tmp_path / "gguf") == 0
    assert run_here("evaluate", tmp_path / "gguf", "--engine", "llama.cpp", "--cache-types", "q8_0") == 2
    assert "takes the checkpoint that it was exported from" in capsys.readouterr().err
