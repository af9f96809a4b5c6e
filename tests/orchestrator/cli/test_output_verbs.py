"""The verbs on the command line, in this process: where they refuse to write, what they replace, what Ctrl-C says."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import run_here
from folder_trees import snapshot
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from verbs import train_from_scratch

from attention.io import checkpoint
from orchestrator import checkpoints
from orchestrator.conversion.curve import is_curve
from orchestrator.conversion.disk_store import DiskStore

Command = Callable[..., int | str | None]


@pytest.fixture(scope="module")
def model(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[..., PreTrainedModel],
    demo_tokenizer: PreTrainedTokenizerBase,
) -> Path:
    """A tiny checkpoint with a tokenizer, and a text next to it; no test may change any of it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama", vocab_size=2048, num_attention_heads=8, num_key_value_heads=8).save_pretrained(folder)
    demo_tokenizer.save_pretrained(folder)
    words = inspect.getsource(argparse).splitlines()
    records = ({"text": "\n".join(words[i : i + 12])} for i in range(0, len(words), 12))
    (folder.parent / "words.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


@pytest.fixture
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; afterwards the model must be as it was."""
    before = snapshot(model.parent)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("HEADFOLD_TRACEBACK", raising=False)
    yield tmp_path / "here"
    assert snapshot(model.parent) == before


@pytest.fixture
def converting(model: Path, place: Path) -> Command:
    """`converting(ratios, *options)`: the verb convert, with the tiny model and text."""
    text = model.parent / "words.jsonl"
    sizes = ["--calibration-tokens", "384", "--eval-tokens", "192", "--sequence-length", "48", "--device", "cpu"]
    sizes += ["--calibration-data", str(text), "--eval-data", str(text)]
    return lambda ratios, *options: run_here(
        "convert", "--model", model, "--recipe", "gqa", "--kv-ratio", ratios, *sizes, *options
    )


@pytest.mark.heavy
def test_convert_and_export_refuse_before_any_weight_is_read(
    converting: Command, model: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (place / "thesis").mkdir()
    (place / "thesis" / "chapter.tex").write_text("mine")
    (place / "file").write_text("mine")
    (place / "link").symlink_to(place / "thesis")
    monkeypatch.setattr(checkpoints, "load_model", lambda *_: pytest.fail("read the weights"))
    monkeypatch.setattr(checkpoint, "load", lambda *_: pytest.fail("read the weights"))
    before = snapshot(place)
    outs = [
        ".",
        "..",
        "file",
        "file/x",
        "link",
        "thesis",
        "thesis/..",
        model,
        model.parent,
        model / "half",
        "/",
        "/proc",
    ]
    for out in outs:
        for overwrite in ([], ["--overwrite"]) if out in ("thesis", model) else (["--overwrite"],):
            calls = [
                lambda *more, out=out: converting("0.5", "--out", out, *more),
                lambda *more, out=out: run_here("export", model, "--target", "gqa", "--out", out, *more),
            ]
            for call in calls:
                assert call(*overwrite) == 2, out
                output = capfd.readouterr().err
                assert "headfold: out: " in output and "Traceback" not in output, output
    for out in ("file", "link", "thesis", model):
        assert converting("0.5", "--layerwise", "--out", out, "--overwrite") == 2
        assert "headfold: out: " in capfd.readouterr().err
        assert converting("0.5,0.25", "--out", out, "--overwrite") == 2
        assert "headfold: out: " in capfd.readouterr().err
    for file in ("file", "thesis", "link", model / "config.json", model / "new.json", "file/x"):
        assert converting("0.5", "--json", file) == 2
        assert run_here("evaluate", model, "--json", file) == 2
        assert run_here("inspect", model, "--out", file) == 2
        output = capfd.readouterr().err
        assert output.count("headfold: json: ") == 2 and output.count("headfold: out: ") == 1, output
    assert converting("0.5", "--out", "new", "--json", "new/result.json") == 2
    assert "in each other's way" in capfd.readouterr().err
    assert snapshot(place) == before


@pytest.mark.heavy
def test_convert_replaces_its_own_result_only_on_request(
    converting: Command, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--out", place / "deep" / "half", "--json", place / "half.json"]
    assert converting("0.5", *options) == 0
    assert "will be saved" not in capfd.readouterr().err
    stored = snapshot(place)
    assert converting("0.25", *options) == 2
    assert "add --overwrite" in capfd.readouterr().err
    assert snapshot(place) == stored
    assert converting("0.25", *options, "--overwrite") == 0
    assert json.loads((place / "half.json").read_text())["kv_ratio"] == 0.25
    assert checkpoint.note_of(place / "deep" / "half")["plan_digest"] != ""
    assert checkpoint.intact(place / "deep" / "half")
    assert sorted(p.name for p in place.iterdir()) == ["deep", "half.json"]
    (place / "deep" / "half" / "notes.txt").write_text("mine")
    stored = snapshot(place)
    assert converting("0.5", *options, "--overwrite") == 2
    assert "notes.txt" in capfd.readouterr().err
    assert snapshot(place) == stored
    for out in ("stock", "stock"):
        code = run_here("export", place / "deep" / "half", "--target", "gqa", "--out", out, "--overwrite")
        assert code == 0
    assert run_here("export", place / "deep" / "half", "--target", "gqa", "--out", "stock") == 2
    assert run_here("export", "stock", "--target", "gqa", "--out", "stock", "--overwrite") == 2
    assert "what is read" in capfd.readouterr().err


@pytest.mark.heavy
def test_a_ratio_joins_the_folder_of_several(
    converting: Command, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert converting("0.5,0.25", "--out", "all") == 0
    assert is_curve("all")
    (place / "all" / "notes.txt").write_text("mine")
    before = snapshot(place)
    assert converting("0.125", "--out", "all") == 0
    assert "checkpoint all/kv-0.125" in capfd.readouterr().out
    after = snapshot(place)
    changed = {name for name in after if before.get(name) != after[name]}
    assert {name.split("/")[1] for name in changed} == {"kv-0.125", "curve.json", "curve.png"}
    assert before.keys() <= after.keys()
    points = json.loads((place / "all" / "curve.json").read_text())["points"]
    assert [point["kv_ratio"] for point in points] == [0.5, 0.25, 0.125]
    assert converting("0.125", "--out", "all") == 2
    assert converting("0.25,0.125", "--out", "all") == 2
    assert "add --overwrite" in capfd.readouterr().err
    assert snapshot(place) == after
    assert converting("0.25,0.125", "--out", "all", "--overwrite") == 0
    again = snapshot(place)
    assert again.keys() == after.keys()
    assert all(again[name] == after[name] for name in after if "/kv-0.5" in name)
    assert len(json.loads((place / "all" / "curve.json").read_text())["points"]) == 3
    assert converting("0.25", "--out", "all/kv-0.5", "--recipe", "mqa") == 2
    assert converting("0.125", "--out", "all", "--recipe", "mqa", "--overwrite") == 2
    assert "another recipe" in capfd.readouterr().err


def test_convert_without_out_says_so_before_the_work(
    converting: Command, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "load_model", stop)
    assert converting("0.5") == 130
    output = capfd.readouterr().err
    assert "the converted model is measured and not saved" in output
    assert output.endswith("headfold: interrupted; nothing was written\n")
    assert list(place.iterdir()) == []


@pytest.mark.heavy
def test_ctrl_c_leaves_nothing_and_says_so(
    converting: Command, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    write_note = checkpoint.write_note

    def stop(folder: Path, *_: Any) -> None:
        assert any(folder.glob("*.safetensors")), "the checkpoint is half written"
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_note", stop)
    assert converting("0.5", "--out", "deep/out", "--json", "r.json") == 130
    assert capfd.readouterr().err.endswith("headfold: interrupted; nothing was written\n")
    assert list(place.iterdir()) == []
    done: list[Path] = []

    def later(folder: Path, *arguments: Any) -> None:
        done.append(folder)
        return stop(folder) if len(done) == 2 else write_note(folder, *arguments)

    monkeypatch.setattr(checkpoint, "write_note", later)
    assert converting("0.5,0.25", "--out", "all") == 130
    assert "kv-0.5 in all are finished, the others not begun" in capfd.readouterr().err
    assert sorted(p.name for p in (place / "all").iterdir()) == ["curve.json", "kv-0.5"]
    monkeypatch.setattr(checkpoint, "write_note", write_note)
    assert converting("0.25,0.125", "--out", "all") == 0
    assert len(json.loads((place / "all" / "curve.json").read_text())["points"]) == 3


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "ctrl_c"])
def test_layer_by_layer_only_finished_layers_are_left(
    error: BaseException,
    converting: Command,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: Path,
) -> None:
    work, broken = DiskStore.convert_layer, 0
    options = ["--layerwise", "--out", "deep/out"]

    def convert_layer(self: Any, layer: int, *arguments: Any) -> Any:
        if layer == broken:
            raise error
        return work(self, layer, *arguments)

    monkeypatch.setattr(DiskStore, "convert_layer", convert_layer)
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    assert converting("0.5", *options) == code
    assert "nothing was written" in capfd.readouterr().err
    assert list(place.iterdir()) == []
    broken = 1
    assert converting("0.5", *options) == code
    output = capfd.readouterr().err
    assert "1 finished layer(s) are kept in" in output and "the same command continues" in output
    after = snapshot(place)
    broken = 2
    assert converting("0.25", *options) == 2
    assert "finished layers of another conversion" in capfd.readouterr().err
    assert snapshot(place) == after
    assert converting("0.5", *options) == 0
    assert "going on after layer 1" in capfd.readouterr().err
    assert [p.name for p in (place / "deep").iterdir()] == ["out"]
    assert checkpoint.intact(place / "deep" / "out")


def test_layer_by_layer_nothing_of_others_is_taken_for_an_earlier_run(
    converting: Command, capfd: pytest.CaptureFixture[str], place: Path
) -> None:
    (place / ".new.layerwise").mkdir()
    (place / ".new.layerwise" / "mine.txt").write_text("mine")
    after = snapshot(place)
    assert converting("0.5", "--layerwise", "--out", "new", "--overwrite") == 2
    assert "mine.txt' is in the way" in capfd.readouterr().err
    assert snapshot(place) == after


def test_a_training_from_scratch_touches_no_folder_of_others(model: Path, place: Path) -> None:
    requested: dict[str, Any] = {"steps": 2, "learning_rate": 1e-3, "sequence_length": 48, "device": "cpu"}
    for taken in ("out", "out.training"):
        (place / taken).mkdir()
        (place / taken / "mine.txt").write_text("mine")
        before = snapshot(place)
        for overwrite in (False, True):
            with pytest.raises(ValueError, match=r"did not write its 'mine\.txt'"):
                train_from_scratch(model, place / "out", overwrite=overwrite, **requested)
        assert snapshot(place) == before
        (place / taken / "mine.txt").unlink()
    with pytest.raises(ValueError, match="what is read"):
        train_from_scratch(model, model, overwrite=True, **requested)
