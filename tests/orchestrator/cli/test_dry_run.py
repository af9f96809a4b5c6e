"""`--dry-run`: what a verb refuses it refuses too, it says what the work takes, and it writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bad_input_folder import digest, fresh_copy, make_folder, run_in

from attention.io import checkpoint

SMALL = ["--sequence-length", "32", "--eval-tokens", "64", "--eval-data", "texts/notes.txt", "--device", "cpu"]
CALIBRATED = [*SMALL, "--calibration-tokens", "64", "--calibration-data", "texts/notes.txt"]
CONVERT = ["convert", "--model", "model", "--recipe", "gqa", "--out", "made", *CALIBRATED]
TRAIN = ["train", "--architecture", "model", "--steps", "3", "--learning-rate", "0.001", "--out", "made", *SMALL]
TRAIN += ["--train-data", "texts/notes.txt", "--set", "train.cpus_per_worker=0.4"]

FINETUNE = ["finetune", "--model", "model", "--tuning", "kv", *TRAIN[3:]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model: Any) -> Path:
    """A folder of tiny checkpoints, a text, a configuration and a search that has ended."""
    template, home = tmp_path_factory.mktemp("template"), tmp_path_factory.mktemp("dry") / "folder"
    make_folder(template, home, tiny_model)
    fresh_copy(template, home)
    return home


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights"))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--steps", "2000"], "train needs 16000 sequences of 32 tokens"),
        (["--eval-tokens", "999999"], "eval needs 31249 sequences of 32 tokens"),
    ],
)
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_training_without_text_enough_is_refused_before_anything_is_written(
    place: Path, more: list[str], said: str, dry: list[str]
) -> None:
    before = digest(place)
    for command in (TRAIN, FINETUNE):
        ran = run_in(place, [*command, *more, *dry])
        assert (ran.code, digest(place)) == (2, before)
        assert said in ran.err


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ["search", "mine.yaml", "data.train.tokens=900000"],
            "data.train: source 'texts/notes.txt'",
        ),
        (["search", "mine.yaml", "promotion.steps=9"], "data.train.tokens"),  # more than one epoch
        (["search", "mine.yaml", "storage=model/runs"], "lies within a checkpoint"),
        ([*CONVERT, "--kv-ratio", "0.3"], "0.3"),
        ([*CONVERT, "--kv-ratio", "0.5", "--out", "work"], "work"),
        ([*CONVERT, "--kv-ratio", "0.5", "--eval-tokens", "90000000"], "texts/notes.txt"),
        (["evaluate", "model", "--baseline", "work", *SMALL], "baseline"),
        (["evaluate", "model", "--engine", "llama.cpp"], "leave out --dry-run"),
        ([*TRAIN, "--out", "work"], "work"),
        ([*FINETUNE, "--out", "work"], "work"),
        (["promote", "runs/mine", "--trial", "gqa-0"], "baseline"),
    ],
)
def test_it_refuses_what_the_verb_refuses(place: Path, command: list[str], said: str) -> None:
    before = digest(place)
    ran = run_in(place, [*command, "--dry-run"])
    assert ran.code == 2, (ran.out, ran.err)
    assert said in ran.err and "all checks passed" not in ran.out
    assert digest(place) == before
