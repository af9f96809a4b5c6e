"""Results of a check when an engine is missing, crashes, or computes something else; nothing is half-written."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import run_here
from engine_plans import together
from hub_cache import put_in_hub_cache
from transformers import AutoTokenizer, PreTrainedModel
from verbs import export_checkpoint

from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.io.export import export
from attention.io.targets import EngineSupport, target
from attention.plan import AttentionPlan
from orchestrator.serving import llama_cpp, transformers
from orchestrator.serving.check import CheckResult, check_export, prompts_for
from orchestrator.serving.engine import CHILDREN, EngineFailure, Question, has_module, idle_threads, run_child
from orchestrator.serving.engines import ENGINES, engine

GROUPS = ((0, 0, 1, 1, 2, 2, 3, 3), (0,) * 8)
PLAN = AttentionPlan(together(*GROUPS, *GROUPS), 32)
LLAMA_CPP = ENGINES["llama.cpp"]


@pytest.fixture(scope="module")
def exported(demo_model: PreTrainedModel, demo_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted demo checkpoint in `source`, and its GGUF file in `gguf`."""
    folder = tmp_path_factory.mktemp("exported")
    checkpoint.save(convert(demo_model, PLAN), folder / "source", demo_dir)
    export(folder / "source", "gguf", folder / "gguf", folder / "source")
    return folder


def _found(folder: Path, gguf: Path, tokenizer: Any = None, support: EngineSupport | None = None) -> list[str]:
    """The reasons of a check of a GGUF file in llama.cpp."""
    model = checkpoint.load(folder / "source")
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder / "source")
    support = support or target("gguf").support_for(model.config, PLAN)
    return check_export(LLAMA_CPP, sys.executable, gguf, model, tokenizer, support, "float32").reasons


def test_the_verb_checks_and_keeps_what_it_found(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = ["--target", "gguf", "--out", out, "--check", "--check-memory", "2", "--json", tmp_path / "record.json"]
    assert run_here("export", exported / "source", *options) == 0
    check = json.loads((tmp_path / "record.json").read_text())["check"]
    assert check == json.loads((out / "export.json").read_text())["check"]
    assert check["passed"] and check["engine"] == "llama.cpp" and check["version"].startswith("xllamacpp ")
    assert check["kv_bytes_per_token"] == 2 * (4 + 1 + 4 + 1) * 32 * 4
    assert check["capacity"] == 2 * 2**30 // check["kv_bytes_per_token"]
    printed = capsys.readouterr().out
    assert "8 of 8 prompts" in printed and "2560 bytes per token by the engine's report, 2560 promised" in printed


def test_an_engine_that_is_not_there_is_reported_before_any_work(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADFOLD_VLLM_PYTHON", raising=False)
    options = ["--out", tmp_path / "out", "--check"]
    assert run_here("export", exported / "source", "--target", "vllm", *options) == 2
    assert "vLLM is not installed for" in (output := capsys.readouterr().err) and "`make engines`" in output
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    assert run_here("export", exported / "source", "--target", "gguf", "--engine-python", bare, *options) == 2
    assert "pip install 'xllamacpp" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "gguf", "--check", "--engine", "vllm"], "target gguf is read by llama.cpp, got vLLM"),
        (["--target", "gguf", "--check", "--engine", "ollama"], "engine must be one of"),
        (["--target", "gguf", "--engine", "llama.cpp"], "add --check"),
    ],
)
def test_a_check_that_cannot_be_is_refused(
    options: list[str], message: str, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("export", exported / "source", "--out", tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_truncated_file_is_what_llama_cpp_says_it_is(exported: Path, tmp_path: Path) -> None:
    whole = (exported / "gguf" / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EngineFailure, match=r"llama\.cpp failed: .*(failed to load model|not within the file bounds)"):
        _found(exported, tmp_path)


def test_another_tokenizer_in_the_file_is_found(exported: Path, tmp_path: Path) -> None:
    whole = json.loads((exported / "source" / "tokenizer.json").read_text())
    whole["model"]["merges"] = whole["model"]["merges"][:400]
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    (tmp_path / "tokenizer_config.json").write_text((exported / "source" / "tokenizer_config.json").read_text())
    other = AutoTokenizer.from_pretrained(tmp_path)
    reasons = _found(exported, exported / "gguf", other)
    assert any("the tokenizer in the export is not the source's" in report for report in reasons)


def test_other_weights_and_another_cache_are_found(
    exported: Path, demo_model: PreTrainedModel, demo_dir: Path, tmp_path: Path
) -> None:
    wider = AttentionPlan(together(*[GROUPS[0]] * 4), 32)
    checkpoint.save(convert(demo_model, wider), tmp_path / "wider", demo_dir)
    export(tmp_path / "wider", "gguf", tmp_path / "gguf", demo_dir)
    reasons = _found(exported, tmp_path / "gguf")
    assert any("log-probabilities differ by up to" in report for report in reasons)
    assert "its cache takes 4096 bytes per token in float32, promised were 2560" in reasons


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", r"crashed \(SIGSEGV\)"),
        ("raise RuntimeError('no such tensor')", "failed: .*no such tensor"),
        ("print('no answer')", "exited without an answer"),
        ("import time; time.sleep(60)", "did not answer within 2 seconds"),
    ],
)
def test_an_engine_that_ends_badly_is_reported(script: str, message: str) -> None:
    with pytest.raises(EngineFailure, match=f"the engine {message}"):
        run_child("the engine", [sys.executable, "-c", script], {}, {}, seconds=2 if "sleep" in script else 60)


def test_a_python_is_found_from_the_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the link that its environment has."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    script = "import json, sys; print(json.dumps({'python': sys.executable}))"
    answer, _ = run_child("the engine", ["bin/python", "-c", script], {}, {})
    assert answer == {"python": str(tmp_path / "bin" / "python")}


def test_the_tokenizer_of_a_hub_name_is_checked(
    demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put_in_hub_cache(monkeypatch, tmp_path / "hub", "someone/demo", demo_dir)
    given: list[Any] = []

    def checked(*arguments: Any, **_: Any) -> CheckResult:
        given.append(arguments[4])
        raise EngineFailure("enough")

    monkeypatch.setattr("orchestrator.serving.export.check_export", checked)
    with pytest.raises(EngineFailure, match="enough"):
        export_checkpoint(name, "gqa", tmp_path / "out", check=True, engine="transformers")
    assert given[0] is not None and len(given[0]) == 2048


def test_a_folder_is_not_a_module_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_engine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert has_module(sys.executable, "json") and not has_module(sys.executable, "an_engine")


def test_a_crash_in_the_middle_of_an_export_leaves_nothing(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    crash = tmp_path / "llama_cpp_child.py"
    crash.write_text("import os\nos.abort()\n")
    monkeypatch.setattr(llama_cpp, "CHILDREN", tmp_path)
    options = ["--target", "gguf", "--out", tmp_path / "out", "--check"]
    assert run_here("export", exported / "source", *options) == 1
    assert "llama.cpp crashed (SIGABRT)" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"llama_cpp_child.py"}


def test_transformers_runs_where_headfold_cannot_be_imported(exported: Path, demo_dir: Path) -> None:
    """Also where it is installed with its packages, and not from its source."""
    child = (CHILDREN / "transformers_child.py").read_text()
    probe = child.replace("    import torch\n    import transformers\n", "    import attention.plan\n")
    packages = transformers._packages
    with pytest.MonkeyPatch.context() as patch:
        folder = exported / "children"
        folder.mkdir()
        (folder / "transformers_child.py").write_text(probe)
        root = Path(transformers.__file__).parents[2]
        patch.setattr(transformers, "_packages", lambda python: f"{packages(python)}{os.pathsep}{root}")
        patch.setattr(transformers, "CHILDREN", folder)
        question = Question(exported / "source", [[1, 2]], 2, "float32", EngineSupport.of([1], 32), 2**30)
        with pytest.raises(EngineFailure, match="'attention' is not a package"):
            ENGINES["transformers"].ask(sys.executable, question)
        patch.setattr(transformers, "CHILDREN", CHILDREN)
        assert ENGINES["transformers"].ask(sys.executable, replace(question, folder=demo_dir))


def test_engines_are_named_in_any_capitals_and_prompts_are_reproducible(demo_model: PreTrainedModel) -> None:
    assert engine("VLLM").name == "vLLM"
    one, texts = prompts_for(demo_model, None)
    assert texts is None and one == prompts_for(demo_model, None)[0] and len(one) == 8


@pytest.mark.parametrize(
    ("log", "held"),
    [
        ("llama_kv_cache: size =    0.62 MiB (   256 cells,   4 layers,  1/1 seqs), K (f32)", 2560),
        ("llama_kv_cache: size =   52.00 MiB ( 16384 cells,   4 layers,  1/1 seqs)", 3328),
    ],
)
def test_bytes_are_read_from_the_log(log: str, held: int) -> None:
    assert llama_cpp.kv_bytes_per_token(f"x\n{log}\ny", 256) == held
    with pytest.raises(EngineFailure, match="does not name the size of its KV cache"):
        llama_cpp.kv_bytes_per_token("nothing", 256)


@pytest.mark.parametrize(("cores", "load", "threads"), [(8, 0.2, 8), (8, 5.0, 3), (2, 9.5, 1), (8, 30.0, 1)])
def test_a_check_takes_the_cores_that_are_idle(
    cores: int, load: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert idle_threads() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert idle_threads() == min(threads, 2)
