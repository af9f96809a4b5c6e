"""The scripts in examples/ run in separate processes, as a reader would run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXForCausalLM, LlamaForCausalLM

from attention.families import geometry_of
from trainers.text.corpora import resolve

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEMO = EXAMPLES / "stdlib-llama"


def _run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=600
    )


@pytest.mark.extended
def test_load_exported_runs_without_the_project(tmp_path: Path) -> None:
    done = _run(str(EXAMPLES / "load_exported.py"), str(DEMO), "--tokens", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "transformers.models.llama" in done.stdout
    # 4 layers x (8 + 8) heads x 32 x 2 bytes
    assert re.search(r"KV cache: \d+ bytes for \d+ tokens, 4096 per token", done.stdout)
    assert "def read_lines" in done.stdout


def test_load_exported_cannot_import_the_project(tmp_path: Path) -> None:
    """Though it is on the path: the model's class is replaced by a module of Headfold."""
    script = tmp_path / "reader.py"
    expected = "from transformers import AutoModelForCausalLM"
    text = (EXAMPLES / "load_exported.py").read_text()
    assert expected in text
    script.write_text(text.replace(expected, f"import attention.plan\n{expected}"))
    done = _run(str(script), str(DEMO), cwd=tmp_path, PYTHONPATH=str(EXAMPLES.parent))
    assert done.returncode != 0 and "'attention' is not a package" in done.stderr


@pytest.mark.extended
def test_a_model_samples_the_text_that_it_is_calibrated_on(tmp_path: Path) -> None:
    sizes = ["--documents", "3", "--tokens", "12"]
    for name in ("one.jsonl", "two.jsonl"):
        done = _run(str(EXAMPLES / "sample_text.py"), str(DEMO), "--out", name, *sizes, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for model in (str(DEMO), "no-model"):  # nothing is replaced, and nothing left of what fails
        for name in ("one.jsonl", "new.jsonl")[: 1 + (model != str(DEMO))]:
            failed = _run(str(EXAMPLES / "sample_text.py"), model, "--out", name, *sizes, cwd=tmp_path)
            assert failed.returncode
    assert not (tmp_path / "new.jsonl").exists()
    texts = list(resolve(str(tmp_path / "one.jsonl")).documents("all", "text", None))
    assert len(set(texts)) == 3 and texts == list(resolve(str(tmp_path / "two.jsonl")).documents("all", "text", None))
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert all(len(tokenizer(text)["input_ids"]) <= 12 for text in texts)


@pytest.mark.extended
def test_curve_compares_recipes(tmp_path: Path) -> None:
    sizes = ["--tokens", "2048", "--recipes", "gqa,least_squares"]
    done = _run(str(EXAMPLES / "curve.py"), str(DEMO), *sizes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [(recipe, size) for recipe, size, _ in result] == [
        (recipe, size) for recipe in ("gqa", "least_squares") for size in ("2,048", "1,024")
    ]
    losses = {(recipe, size): float(loss) for recipe, size, loss in result}
    assert losses["least_squares", "1,024"] < losses["gqa", "1,024"]


@pytest.mark.extended
def test_train_demo_makes_a_checkpoint(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_demo.py")
    sizes = ["--steps", "2", "--tokens", "40000", "--eval-tokens", "4096"]
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as ray_folder:  # a short path, for sockets
        own_ray = {"RAY_TMPDIR": ray_folder, "RAY_ADDRESS": "local"}
        done = _run(script, "--out", str(tmp_path / "made"), *sizes, cwd=tmp_path, OMP_NUM_THREADS="1", **own_ray)
        assert done.returncode == 0, done.stderr
        again = _run(script, "--out", str(tmp_path / "made"), *sizes, cwd=tmp_path)
    loss = re.search(r"held-out loss ([\d.]+) nats per token after 16384 tokens", done.stdout)
    # An untrained model of 2,048 tokens starts at ln 2048 = 7.62; two steps must have taken it below.
    assert loss and 6.0 < float(loss[1]) < 7.5

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made" / "trained", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made" / "trained")
    assert type(model) is LlamaForCausalLM and model.config.vocab_size == len(tokenizer) == 2048
    assert tokenizer.eos_token_id == 0
    text = "def read(self):\n    return self._file.read()  # é\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert again.returncode != 0 and "exists" in again.stderr


@pytest.mark.extended
def test_train_second_makes_a_checkpoint_of_another_family(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_second.py")
    sizes = ["--steps", "2", "--tokens", "20000", "--eval-tokens", "4096", "--packages"]  # the standard library alone
    out = tmp_path / "made"
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        own_ray = {"RAY_TMPDIR": ray_folder, "RAY_ADDRESS": "local"}
        done = _run(script, "--out", str(out), *sizes, cwd=tmp_path, OMP_NUM_THREADS="1", **own_ray)
    assert done.returncode == 0, done.stderr
    loss = re.search(r"held-out loss ([\d.]+) nats per token after 8192 tokens", done.stdout)
    assert loss and 6.0 < float(loss[1]) < 7.6  # ln 2048 = 7.62 before the first step
    model = AutoModelForCausalLM.from_pretrained(out / "trained", dtype=torch.float32)
    assert type(model) is GPTNeoXForCausalLM
    geometry = geometry_of(model.config)
    assert (geometry.head_dim, geometry.rotary.dims, len(geometry.rotary.free)) == (16, 4, 12)
    assert AutoTokenizer.from_pretrained(out / "trained").eos_token_id == 0
    texts = [
        text
        for side in ("train", "held_out")
        for text in resolve(str(out / "prose.jsonl")).documents(side, "text", None)
    ]
    assert len(texts) == len(set(texts)) > 1000
    assert not any(">>>" in text for text in texts)


@pytest.mark.extended
def test_train_third_makes_a_checkpoint_that_shares_its_heads(tmp_path: Path) -> None:
    sizes = ["--steps", "2", "--tokens", "20000", "--eval-tokens", "4096"]
    out = tmp_path / "made"
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        own_ray = {"RAY_TMPDIR": ray_folder, "RAY_ADDRESS": "local"}
        script = str(EXAMPLES / "train_third.py")
        done = _run(script, "--out", str(out), *sizes, cwd=tmp_path, OMP_NUM_THREADS="1", **own_ray)
    assert done.returncode == 0, done.stderr
    loss = re.search(r"held-out loss ([\d.]+) nats per token after 8192 tokens", done.stdout)
    assert loss and 6.0 < float(loss[1]) < 7.6  # ln 2048 = 7.62 before the first step
    model = AutoModelForCausalLM.from_pretrained(out / "trained", dtype=torch.float32)
    geometry = geometry_of(model.config)
    assert (geometry.family, geometry.num_heads, geometry.num_kv_heads, geometry.qk_norm) == ("qwen3", 8, 4, True)
    texts = [json.loads(line)["text"] for line in (out / "mixed.jsonl").open(encoding="utf-8")]
    assert any("import" in text for text in texts[:100]) and len(texts) > 1000
