"""`headfold evaluate --engine`: what it measures, and what it refuses. Nothing is asserted of how fast anything is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import run_here
from engine_plans import together
from transformers import PreTrainedModel

from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.io.export import export
from attention.plan import AttentionPlan
from orchestrator.serving import speed
from orchestrator.serving.engine import Engine, EngineFailure, SpeedAnswer, SpeedQuestion
from orchestrator.serving.engines import ENGINES

FOUR, ONE = (0, 0, 1, 1, 2, 2, 3, 3), (0,) * 8
SPEEDS = {"prefill_tokens_per_second", "decode_tokens_per_second"}


@pytest.fixture(scope="module")
def converted(demo_model: PreTrainedModel, demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo checkpoint with 4, 1, 4 and 1 KV heads in `source`, and its GGUF file in `gguf`; both in float32."""
    folder = tmp_path_factory.mktemp("converted")
    plan = AttentionPlan(together(FOUR, ONE, FOUR, ONE), 32)
    checkpoint.save(convert(demo_model, plan), folder / "source", demo_dir)
    export(folder / "source", "gguf", folder / "gguf", folder / "source")
    return folder


def _measured(path: Path, original: Path, folder: Path, *options: str) -> dict[str, Any]:
    requested = ["--original", original, "--context-lengths", "64,96", "--speed-tokens", "4", "--dtype", "float32"]
    assert run_here("evaluate", path, *requested, "--json", folder / "record.json", *options) == 0
    record = json.loads((folder / "record.json").read_text())
    assert [at["context_length"] for at in record["context_lengths"]] == [64, 96]
    cached = {key: facts["kv_bytes_per_token"] for key, facts in record["models"].items()}
    assert cached == {"checkpoint": 2 * (4 + 1 + 4 + 1) * 32 * 4, "original": 2 * 4 * 8 * 32 * 4}
    for at in record["context_lengths"]:
        for key, bytes_per_token in cached.items():
            assert at[key].keys() > SPEEDS and all(at[key][name] > 0 for name in SPEEDS)
            assert at[key]["sequences"] == record["memory"] // bytes_per_token // at["context_length"]
        for name, ratio in at["ratios"].items():
            assert ratio == pytest.approx(at["checkpoint"][name] / at["original"][name])
    return record


@pytest.mark.extended
def test_llama_cpp_is_timed_with_checkpoints_and_with_an_export(
    converted: Path, demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "ROUNDS", 2)
    record = _measured(converted / "source", demo_dir, tmp_path, "--engine", "llama.cpp", "--cache-memory", "2")
    assert record["engine"] == "llama.cpp" and record["version"].startswith("xllamacpp ")
    assert record["memory"] == 2 * 2**30 and record["measurements"] == 2 * speed.REPETITIONS
    printed = capsys.readouterr().out
    assert "cache in float32, of 2 GiB" in printed and "2,560" in printed and "0.31 x" in printed
    of_export = _measured(converted / "gguf", demo_dir, tmp_path, "--engine", "llama.cpp", "--cache-memory", "2")
    assert of_export["models"] == record["models"] and of_export["checkpoint"] == str(converted / "gguf")


@pytest.mark.extended
def test_transformers_is_timed(
    converted: Path, demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "ROUNDS", 1)
    record = _measured(converted / "source", demo_dir, tmp_path, "--engine", "transformers")
    # Transformers reads different counts per layer with the modelling file of this target.
    assert {key: facts["target"] for key, facts in record["models"].items()} == {
        "checkpoint": "per_layer",
        "original": "gqa",
    }


def test_a_gguf_file_is_timed_from_its_plain_copy(
    converted: Path, demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "ROUNDS", 1)
    assert run_here("export", demo_dir, "--target", "gguf", "--out", tmp_path / "gguf") == 0
    (file,) = (tmp_path / "gguf").glob("*.gguf")
    monkeypatch.chdir(converted)  # an engine runs in a separate folder: paths may still be relative
    record = _measured(Path("gguf"), file, tmp_path, "--engine", "llama.cpp", "--cache-memory", "2")
    assert record["original"] == str(file)
    assert record["models"]["original"]["kv_bytes_per_token"] > record["models"]["checkpoint"]["kv_bytes_per_token"]


def test_models_take_turns_with_the_same_prompts_and_medians_are_kept(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[SpeedQuestion] = []

    def time(python: str, question: SpeedQuestion) -> SpeedAnswer:
        requested.append(question)
        seconds = [(2.0, 0.5), (1.0, 1.0), (90.0, 90.0)]
        return SpeedAnswer("0", [seconds for _ in question.prompts], "float32", 2560, 100)

    fake = Engine("llama.cpp", lambda python: "python", ENGINES["llama.cpp"].ask, time)
    monkeypatch.setattr(speed, "engine_named", lambda name: fake)
    gguf = converted / "gguf"
    record = speed.engine_speed(gguf, gguf, engine="llama.cpp", lengths="64,128", tokens=4)
    assert len(requested) == 2 * speed.ROUNDS and all(one.prompts == requested[0].prompts for one in requested)
    assert [len(prompt) for prompt in requested[0].prompts] == [60, 124]
    first, second = record["context_lengths"]
    assert first["checkpoint"] == dict(zip(sorted(SPEEDS, reverse=True), (30.0, 3.0), strict=True)) | {"sequences": 1}
    assert second["ratios"]["decode_tokens_per_second"] == 1.0 and second["ratios"]["sequences"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "ollama"], "engine must be one of"),
        (["--engine", "llama.cpp", "--tasks", "demo"], "leave out --tasks"),
        (["--engine", "llama.cpp", "--sequence-length", "512"], "leave out --sequence-length"),
        (["--engine", "llama.cpp", "--context-lengths", "1024"], "got 1024"),
        (["--engine", "llama.cpp", "--speed-tokens", "1"], "at least 2 tokens to decode, got 1"),
        (["--engine", "llama.cpp", "--context-lengths", "64", "--speed-tokens", "64"], "no prompt in a context of 64"),
        (["--engine", "transformers"], "was exported for llama.cpp, not for transformers"),
        (["--engine-python", "python3"], "add --engine"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], message: str, converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("evaluate", converted / "gguf", *options) == 2
    assert message in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_reported_before_any_work(
    demo_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADFOLD_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(speed, "export_checkpoint", lambda *_, **__: pytest.fail("it was exported"))
    assert run_here("evaluate", demo_dir, "--engine", "vLLM") == 2
    assert "vLLM is not installed for" in (output := capsys.readouterr().err) and "`make engines`" in output


def test_a_file_without_a_vocabulary_has_the_limits_of_its_header(converted: Path, tmp_path: Path) -> None:
    export(converted / "source", "gguf", tmp_path / "bare")
    assert speed._limits(tmp_path / "bare") == speed._limits(converted / "gguf")


def test_python_files_in_an_export_run_only_if_requested(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(converted / "source", "transformers", tmp_path / "out", converted / "source")
    assert run_here("evaluate", tmp_path / "out", "--engine", "transformers") == 2
    assert "add --trust-remote-code" in capsys.readouterr().err


def test_a_file_that_is_broken_is_what_the_engine_says_it_is(converted: Path, tmp_path: Path) -> None:
    whole = (converted / "gguf" / "model.gguf").read_bytes()
    question = SpeedQuestion(tmp_path, [[1] * 8], 2, 1, "float32", speed.EngineSupport.of([4, 1, 4, 1], 32), 2**30)
    (tmp_path / "model.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EngineFailure, match=r"llama\.cpp failed"):
        ENGINES["llama.cpp"].time(sys.executable, question)
