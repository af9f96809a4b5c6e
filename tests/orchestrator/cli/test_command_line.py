"""The command line as a user meets it: three ways to start it, exit codes, messages without tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run_here
from typer.main import get_command

from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from orchestrator import main
from orchestrator.cli.help_panels import GROUPS

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = [sys.executable, str(REPOSITORY / "orchestrator" / "main.py")]
MODULE = [sys.executable, "-m", "orchestrator.main"]
INSTALLED = [str(Path(sys.executable).parent / "headfold")]


def run(
    command: list[str], *arguments: str | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "HEADFOLD_TRACEBACK")}
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=cwd or REPOSITORY,
        env=clean | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("command", [SCRIPT, MODULE, INSTALLED], ids=["script", "module", "installed"])
def test_each_way_of_starting_lists_the_verbs(command: list[str]) -> None:
    done = run(command, "--help")
    assert done.returncode == 0, done.stderr
    for verb in ("search", "convert", "estimate", "evaluate", "train", "promote", "export", "report"):
        assert verb in done.stdout


def test_the_script_runs_from_anywhere_and_hides_no_library(tmp_path: Path) -> None:
    """As a script Python puts orchestrator/ first on the path: no file or folder there may have a library's name."""
    done = run(SCRIPT, "search", "nothing.yaml", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "no configuration file at 'nothing.yaml'" in done.stderr
    ours = {path.stem for path in (REPOSITORY / "orchestrator").iterdir() if path.suffix in ("", ".py")}
    assert {"config", "search"} <= ours
    assert not ours & (set(metadata.packages_distributions()) | sys.stdlib_module_names)


LIGHT = """
import contextlib, io, json, sys
from orchestrator import main
from orchestrator.cli.help_panels import GROUPS

results = []
for arguments in json.load(sys.stdin):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main.run(arguments)
        except SystemExit as end:
            code = end.code
    results.append([code, printed.getvalue(), [name for name in sys.argv[1:] if name in sys.modules]])
print(json.dumps(results))
"""
HEAVY = ("torch", "ray", "transformers", "mlflow", "deepspeed", "optuna", "peft", "scipy", "datasets", "matplotlib")
VERBS = tuple(command.callback.__name__ for command in main.app.registered_commands if command.callback)
MISTAKES = {
    "no such verb": "serch",
    "no such option": "convert --modle x",
    "an option without its value": "convert --model",
    "a value that cannot be": "export x --target gqa --out o --check-memory 0",
    "a required option left out": "finetune --model x",
    "one word too many": "inspect a b",
    "an unknown key": "search configs/demo.yaml search.num_samplez=4",
    "a wrong value": "search configs/demo.yaml search.kv_ratios=[1.5]",
    "no such configuration": "search nothing.yaml",
    "an unknown key of the demo": "demo search.num_samplez=4",
    "an unknown key of train": "train --architecture x --steps 1 --learning-rate 1 --out o --set train.rate=1",
    "an unknown key of finetune": "finetune --model x --steps 1 --learning-rate 1 --out o --set train.rate=1",
    "an option of its own": "finetune --model x --steps 1 --learning-rate 1 --out o --set train.seed=1",
    **{f"{verb} of no search": f"{verb} configs" for verb in ("promote", "report", "watch", "ui")},
}


def test_help_and_mistakes_import_nothing_heavy() -> None:
    """In one process, whose modules only become more."""
    helps = [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS)]
    misspelt = [[verb, "--no-such-option"] for verb in VERBS]
    wrong = [*misspelt, *(words.split() for words in MISTAKES.values())]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *HEAVY],
        cwd=REPOSITORY,
        input=json.dumps([*helps, *wrong]),
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(done.stdout)
    assert len(VERBS) > 10 and len(results) == len(helps) + len(wrong)
    for arguments, (code, printed, heavy) in zip([*helps, *wrong], results, strict=True):
        assert heavy == [], f"{arguments} imports {heavy}"
        assert code == (0 if arguments in helps else 2), printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "nothing.yaml"], ["nothing.yaml"]),
        (["search", "configs/demo.yaml", "search.num_samplez=4"], ["search.num_samplez", "did you mean num_samples?"]),
        (["search", "configs/demo.yaml", "search.kv_ratios=[1.5]"], ["search.kv_ratios.0", "1.5", "(0, 1)"]),
        (["search", "configs/demo.yaml", "model.path=/none", "storage=STORE"], ["model.path", "/none"]),
        (["search", "configs/demo.yaml", "--resume", "storage=STORE", "name=never"], ["--resume", "never"]),
        (["promote", "configs"], ["configs", "folder of a search"]),
        (
            [
                "train",
                "--architecture",
                "DEMO",
                "--steps",
                "1",
                "--learning-rate",
                "1",
                "--out",
                "o",
                "--set",
                "train.rate=1",
            ],
            ["train.rate", "unknown key"],
        ),
        (["report", "/none"], ["/none", "folder of a search"]),
        (["convert", "--model", "/none", "--recipe", "gqa", "--kv-ratio", "0.5"], ["model", "/none"]),
        (["convert", "--model", "DEMO", "--recipe", "gqq", "--kv-ratio", "0.5"], ["gqq", "headfold"]),
        (["convert", "--model", "DEMO", "--recipe", "gqa", "--kv-ratio", "0"], ["kv_ratio", "0"]),
        (["convert", "--model", "DEMO", "--recipe", "gqa", "--kv-ratio", "0.3", "--strict"], ["0.3"]),
        (["convert", "--model", "DEMO", "--recipe", "gqa", "--kv-ratio", "half"], ["kv_ratio", "half"]),
        (["convert", "--model", "DEMO", "--recipe", "gqa", "--kv-ratio", "0.5,0.05"], ["gqa", "got 5%", "12.5%"]),
        (["convert", "--model", "DEMO", "--recipe", "gqa", "--kv-ratio", "0.5", "--dtype", "int4"], ["dtype", "int4"]),
        (["convert", "--model", "DEMO", "--recipe", "gqa", "--kv-ratio", "0.5", "--device", "cuda"], ["cuda"]),
        (["convert", "--model", "DEMO", "--recipe", "gqa", "--kv-ratio", "0.5", "--set", "fusoin=mean"], ["fusoin"]),
        (["convert", "--model", "DEMO", "--recipe", "gqa", "--kv-ratio", "0.5", "--layerwise"], ["--out"]),
        (
            [
                "convert",
                "--model",
                "DEMO",
                "--recipe",
                "headfold",
                "--kv-ratio",
                "0.5",
                "--set",
                "allocation.increases=measured",
                "--layerwise",
                "--out",
                "STORE",
            ],
            ["--set allocation.increases=estimated"],
        ),
        (["estimate", "--model", "/none", "--recipe", "gqa", "--kv-ratio", "0.5"], ["model", "/none"]),
        (["evaluate", "/none"], ["checkpoint", "/none"]),
        (["evaluate", "DEMO", "--sequence-length", "9999"], ["sequence_length", "9999", "512"]),
        (["inspect", "/none"], ["/none"]),
        (["inspect", "DEMO", "--kv-ratio", "0.5,2"], ["kv_ratio", "2"]),
        (["inspect", "DEMO", "--compare", "gqa,gqq"], ["gqq", "headfold"]),
        (["inspect", "DEMO", "--counts", "some"], ["some", "divisors"]),
        (["inspect", "DEMO", "--out", "DEMO"], ["folder", "inspection.html"]),
        (["export", "/none", "--target", "gqa", "--out", "STORE"], ["/none"]),
        (["export", "DEMO", "--target", "gguff", "--out", "STORE"], ["gguff", "gqa"]),
        (["search"], ["config"]),
        (["serch"], ["serch"]),
    ],
)
def test_a_mistake_ends_with_a_message_and_exit_code_2(
    arguments: list[str],
    message: list[str],
    tmp_path: Path,
    demo_dir: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, for a process each takes minutes; that a process' exit code is the same is tested above."""
    if "--device" in arguments and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("HEADFOLD_TRACEBACK", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    known = {"STORE": str(tmp_path / "store"), "DEMO": str(demo_dir), "storage=STORE": f"storage={tmp_path / 'store'}"}
    code = run_here(*(known.get(a, a) for a in arguments))
    output = capfd.readouterr().err
    assert code == 2, output
    assert "Traceback" not in output
    for word in message:
        assert word.lower() in output.lower()


def test_more_workers_than_this_machine_has_are_refused_before_any_work(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    sizes = ["data.train.tokens=8192", "data.eval.tokens=2048", "data.calibration.tokens=2048"]
    workers = ["train.num_workers=512", "train.batch_size=512", "data.max_epochs=10000"]
    code = run_here("search", "configs/demo.yaml", f"storage={tmp_path}", *sizes, *workers)
    output = capfd.readouterr().err
    assert code == 2, output
    assert "train.num_workers" in output
    assert "Traceback" not in output
    assert not (tmp_path / "demo").exists()


def test_convert_evaluate_and_export_hand_on_to_each_other(tmp_path: Path, demo_dir: Path, little_text: str) -> None:
    sizes = ["--eval-tokens", "1024", "--sequence-length", "128", "--eval-data", little_text]
    options = ["--model", demo_dir, "--recipe", "gqa", "--kv-ratio", "0.25", "--out", tmp_path / "c", *sizes]
    options += ["--calibration-tokens", "2048", "--calibration-data", little_text]
    assert run_here("convert", *options, "--json", tmp_path / "convert.json") == 0
    converted = json.loads((tmp_path / "convert.json").read_text())
    for key in (
        "original_loss",
        "loss",
        "loss_increase",
        "kl",
        "kv_ratio",
        "parameters",
        "recipe",
        "plan",
        "seed",
        "seconds",
    ):
        assert key in converted
    assert converted["kv_ratio"] == 0.25
    assert converted["cache_bytes_measured"] == converted["cache_tokens"] * converted["kv_bytes_per_token"]
    assert converted["loss_increase"] == pytest.approx(converted["loss"] - converted["original_loss"])
    assert converted["loss_increase"] > 1
    assert (converted["dtype"], converted["kv_bytes_per_token"]) == ("bfloat16", 4096 // 4)
    assert (converted["format"], converted["loads_in"]) == ("stock", ["transformers", "vLLM", "llama.cpp"])

    sizes_and_json = (*sizes, "--json", tmp_path / "evaluate.json")
    same_text = [("--data" if option == "--eval-data" else option) for option in sizes_and_json]
    assert run_here("evaluate", tmp_path / "c", "--original", demo_dir, *same_text) == 0
    evaluated = json.loads((tmp_path / "evaluate.json").read_text())
    assert evaluated["loss"] == pytest.approx(converted["loss"], abs=1e-4)
    assert evaluated["kl"] == pytest.approx(converted["kl"], abs=1e-4)
    assert evaluated["recipe"]["name"] == "gqa"
    assert evaluated["decode_tokens_per_second"] > 0

    options = ["--target", "gqa", "--out", tmp_path / "e", "--json", tmp_path / "export.json"]
    assert run_here("export", tmp_path / "c", *options) == 0
    exported = json.loads((tmp_path / "export.json").read_text())
    assert exported["model_type"] == "llama"
    assert exported["exact"] is True
    assert exported["kv_bytes_per_token_after"] * 4 == exported["kv_bytes_per_token_original"]
    assert (tmp_path / "e" / "tokenizer.json").read_bytes() == (demo_dir / "tokenizer.json").read_bytes()


def test_an_export_that_grows_the_cache_ends_with_2_and_both_numbers(
    tmp_path: Path, tiny_model: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    layer = LayerPlan((0, 0, 1, 1), (0, 1, 0, 1))
    source = checkpoint.save(convert(tiny_model("llama"), AttentionPlan((layer,) * 2, 8)), tmp_path / "apart")
    options = ["export", source, "--target", "gqa", "--out", tmp_path / "out"]
    assert run_here(*options) == 2
    output = capfd.readouterr().err
    assert all(text in output for text in ("512 KV bytes per token", "the plan 256", "--allow-larger-cache"))
    assert not (tmp_path / "out").exists()
    assert run_here(*options, "--allow-larger-cache") == 0
    assert "a stock Llama checkpoint, which transformers and vLLM load as it is" in capfd.readouterr().out


def test_every_verb_is_in_a_group_with_two_examples_whose_options_exist() -> None:
    verbs = get_command(main.app).commands  # type: ignore[attr-defined]
    assert [verb for group in GROUPS.values() for verb in group] == list(verbs)
    for name, verb in verbs.items():
        examples = [line for line in verb.epilog.split("\n\n") if line.startswith("headfold ")]
        assert len(examples) == 2
        options = {option for parameter in verb.params for option in parameter.opts}
        for example in examples:
            words = example.split()
            assert words[1] == name and {word for word in words if word.startswith("--")} <= options
