"""`--dry-run`: what a verb refuses it refuses too, it says what the work takes, and it writes nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bad_input_folder import digest, fresh_copy, make_folder, run_in
from command_line import run_here

from attention.base.timing import duration
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
    ("command", "message"),
    [
        # 2 arms at 1 ratio; the best one and the baseline are promoted, 2 sequences of 32 tokens per step for 2 steps
        (["search", "mine.yaml"], r"^trials: 2; 0 full training\(s\) in the promotion\ntokens: about 192 "),
        (["search", "mine.yaml"], r"^folder: \S+/mine-2 \('mine' exists already; --resume continues"),
        (["search", "mine.yaml", "name=fresh"], r"^folder: \S+/fresh$"),
        (["search", "mine.yaml", "promotion.steps=3"], r"^trials: 2; 2 full training"),
        # 2 layers x 2 of 4 heads x (8 + 8) x 4 bytes
        ([*CONVERT, "--kv-ratio", "0.5"], r"^cache: 50% of the original: 256 of 512 KV bytes per token$"),
        ([*CONVERT, "--kv-ratio", "0.5,0.25"], r"^cache: 25% of the original: 128 of 512 KV bytes per token$"),
        ([*CONVERT, "--kv-ratio", "0.5", "--layerwise"], r"^memory: .* layer by layer; "),
        (["evaluate", "model", "--original", "model", *SMALL], r"^measures: held-out loss of 2 model\(s\) on 64 tok"),
        (TRAIN, r"^training: transformer, 3 steps, 768 tokens \(1 epochs of the text\)$"),
        (FINETUNE, r"^training: keys and values of model, 3 steps, 768 tokens \(1 epochs of the text\)$"),
        (
            ["promote", "runs/mine", "--trial", "headfold_gqa-1"],
            r"^promote: headfold_gqa-1 .*\ntrainings: 2 not",
        ),
    ],
)
def test_it_reports_and_writes_nothing(place: Path, command: list[str], message: str) -> None:
    before = digest(place)
    ran = run_in(place, [*command, "--dry-run"])
    assert ran.code == 0, ran.err
    assert re.search(message, ran.out, re.MULTILINE), ran.out
    assert ran.out.endswith("dry run: all checks passed, nothing was written\n")
    assert digest(place) == before


@pytest.mark.usefixtures("unread")
def test_the_json_of_a_run_is_not_written(place: Path) -> None:
    ran = run_in(place, [*CONVERT, "--kv-ratio", "0.5", "--json", "result.json", "--dry-run"])
    assert ran.out.endswith("nothing was written, result.json neither\n")
    assert not (place / "result.json").exists()


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (["search", "mine.yaml", "--dry-run"], {"training worker", "weights", "gradients", "planning"}),
        (["estimate", "mine.yaml"], {"training worker", "weights", "gradients", "planning"}),
        ([*CONVERT, "--kv-ratio", "0.5", "--dry-run"], {"calibrate", "plan", "convert", "head"}),
        (["estimate", "--model", "model", "--recipe", "gqa", "--kv-ratio", "0.5", *SMALL[:4]], {"plan", "head"}),
        ([*TRAIN, "--dry-run"], {"libraries", "weights", "gradients", "optimiser"}),
        ([*FINETUNE, "--dry-run"], {"libraries", "weights", "gradients", "optimiser"}),
    ],
)
def test_memory_is_one_line_and_its_parts_are_verbose(place: Path, command: list[str], parts: set[str]) -> None:
    def lines(*more: str) -> list[str]:
        ran = run_in(place, [*command, *more])
        assert ran.code == 0, ran.err
        return [line for line in ran.out.splitlines() if line.startswith("memory")]

    [line] = lines()
    assert re.match(r"memory: \d+\.\d\d GiB ", line) and not {part for part in parts if f" {part} " in line}
    verbose = "\n".join(lines("--verbose"))
    assert all(re.search(rf" {part}[ :]", verbose) for part in parts), verbose


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["search", "mine.yaml", "data.train.tokens=900000"],
            "data.train: source 'texts/notes.txt'",
        ),
        (["search", "mine.yaml", "promotion.steps=9"], "data.train.tokens"),  # more than one epoch
        (["search", "mine.yaml", "storage=model/runs"], "is within a checkpoint"),
        ([*CONVERT, "--kv-ratio", "0.3", "--strict"], "0.3"),
        ([*CONVERT, "--kv-ratio", "0.5", "--out", "work"], "work"),
        ([*CONVERT, "--kv-ratio", "0.5", "--eval-tokens", "90000000"], "texts/notes.txt"),
        (["evaluate", "model", "--baseline", "work", *SMALL], "baseline"),
        (["evaluate", "model", "--engine", "llama.cpp"], "leave out --dry-run"),
        ([*TRAIN, "--out", "work"], "work"),
        ([*FINETUNE, "--out", "work"], "work"),
        (["promote", "runs/mine", "--trial", "gqa-0"], "baseline"),
    ],
)
def test_it_refuses_what_the_verb_refuses(place: Path, command: list[str], message: str) -> None:
    before = digest(place)
    ran = run_in(place, [*command, "--dry-run"])
    assert ran.code == 2, (ran.out, ran.err)
    assert message in ran.err and "all checks passed" not in ran.out
    assert digest(place) == before


def test_more_than_there_are_is_reported(place: Path) -> None:
    ran = run_in(place, ["promote", "runs/mine", "--top", "99", "--dry-run"])
    assert ran.code == 0 and "note: --top 99 takes every trial that has a result: there are 2 at 50%" in ran.err


def test_a_relaxation_that_cannot_end_is_warned_of(place: Path) -> None:
    slow = "search.recipes=[gqa, {recipe: align, params: {relaxation.rate: 0.01}}]"
    ran = run_in(place, ["search", "mine.yaml", slow, "--dry-run"])
    assert ran.code == 0, ran.err
    assert re.search(r"warning: align: \d+ steps are too few for relaxation hard_concrete at rate 0\.01", ran.err)


def test_a_model_next_to_the_file_is_not_searched_on_the_hub(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here("search", place / "mine.yaml", "--dry-run") == 2
    assert f"relative to the current folder, and there is none of that name in {str(tmp_path)!r}; there is " in (
        output := capsys.readouterr().err
    )
    assert f"run from {str(place)!r}" in output


def test_an_estimate_for_another_machine_needs_no_gpu_here(place: Path) -> None:
    requested = ["estimate", "--model", "model", "--recipe", "gqa", "--kv-ratio", "0.5", *SMALL[:4]]
    for more in (["--device", "cuda"], ["--gpus", "1", "--gpu-memory", "80"]):
        ran = run_in(place, [*requested, *more])
        assert ran.code == 0, ran.err
        there = "80.00 GiB" if "80" in more else "an unknown amount"
        assert re.search(
            rf"^memory: \S+ GiB of GPU memory and \S+ GiB of the machine's, or .*; {there} on each GPU$",
            ran.out,
            re.MULTILINE,
        )
        assert re.search(r"about \d+ (s|min) on this machine's \d+ CPUs; for the time on a GPU name its type", ran.out)
    here = run_in(place, [*requested, "--device", "cpu"])
    assert re.search(r"^memory: .* GiB available$", here.out, re.MULTILINE) and "GPU" not in here.out


def test_an_estimate_for_a_named_gpu_has_its_memory_and_its_speed(place: Path) -> None:
    command = ["estimate", "--model", "model", "--recipe", "gqa", "--kv-ratio", "0.5", *SMALL[:4]]
    estimates: dict[str, Any] = {}
    for gpu in ("T4", "H100", "A100-80G"):
        ran = run_in(place, [*command, "--gpu", gpu, "--json", f"{gpu}.json"])
        assert ran.code == 0, ran.err
        assert f"on one {gpu}, by what was measured on an H200" in ran.out
        estimates[gpu] = json.loads((place / f"{gpu}.json").read_text())
    assert estimates["T4"]["available"] == 16 * 10**9 and estimates["A100-80G"]["available"] == 80 * 10**9
    assert estimates["T4"]["rate"] < estimates["A100-80G"]["rate"] < estimates["H100"]["rate"]
    for more, message in ((["--gpu", "H900"], "did you mean H200?"), (["--gpu", "T4", "--gpus", "0"], "without a GPU")):
        ran = run_in(place, [*command, *more])
        assert ran.code == 2 and message in ran.err


@pytest.mark.parametrize(
    ("seconds", "message"),
    [(12.2, "13 s"), (60, "1 min"), (3599, "1 h"), (12_000, "3 h 20 min"), (134_202, "37 h"), (36_000, "10 h")],
)
def test_times_are_in_hours_where_they_are_long(seconds: float, message: str) -> None:
    assert duration(seconds) == message


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "2000"], "train needs 16000 sequences of 32 tokens"),
        (["--eval-tokens", "999999"], "eval needs 31249 sequences of 32 tokens"),
    ],
)
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_training_without_text_enough_is_refused_before_anything_is_written(
    place: Path, more: list[str], message: str, dry: list[str]
) -> None:
    before = digest(place)
    for command in (TRAIN, FINETUNE):
        ran = run_in(place, [*command, *more, *dry])
        assert (ran.code, digest(place)) == (2, before)
        assert message in ran.err
