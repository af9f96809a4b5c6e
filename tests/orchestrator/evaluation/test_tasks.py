"""Tasks of the real lm-evaluation-harness, on the demo checkpoint: which are found, what is refused, who is better."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import run_here
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from attention.base.progress import show_progress
from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.config.schema import ConfigError
from orchestrator.evaluation.task_files import SHIPPED, task_specs, with_absolute_paths
from orchestrator.evaluation.tasks import HarnessTasks, Scores

REPOSITORY = Path(__file__).resolve().parents[3]
TASK: dict[str, Any] = {
    "task": "few",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "few.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A folder with one task file of eight shipped items, fields of it changed."""

    def written(**changes: Any) -> Path:
        lines = (SHIPPED["demo"] / "which_name.jsonl").read_text().splitlines()[:8]
        (tmp_path / "few.jsonl").write_text("\n".join(lines) + "\n")
        (tmp_path / "few.yaml").write_text(yaml.safe_dump(TASK | changes))
        return tmp_path

    return written


CHANCES = (("next_line", "acc", 0.25), ("which_name", "acc", 0.25), ("complete_name", "exact_match", 0))


@pytest.fixture(scope="module")
def scores(demo_model: PreTrainedModel, demo_tokenizer: PreTrainedTokenizerBase) -> Scores:
    """Of the demo model on every shipped task."""
    return HarnessTasks(["demo"]).scores(demo_model, demo_tokenizer)


@pytest.mark.extended
def test_the_demo_model_is_far_above_chance_on_every_shipped_task(scores: Scores) -> None:
    for name, metric, chance in CHANCES:
        assert scores[name]["items"] == 64
        assert scores[name][metric] > chance + 4 * scores[name][f"{metric}_stderr"]


@pytest.mark.extended
def test_random_weights_are_at_chance(
    scores: Scores, demo_model: PreTrainedModel, demo_tokenizer: PreTrainedTokenizerBase
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        untrained = AutoModelForCausalLM.from_config(demo_model.config).eval()
    random = HarnessTasks(["demo"]).scores(untrained, demo_tokenizer)
    for name, metric, chance in CHANCES:
        assert abs(random[name][metric] - chance) < 3 * scores[name][f"{metric}_stderr"]


def test_data_files_may_have_absolute_names_and_patterns(write: Write, tmp_path: Path) -> None:
    for name in (tmp_path / "few.jsonl", tmp_path / "f*.jsonl"):
        assert task_specs([str(write(dataset_kwargs={"data_files": {"test": str(name)}}))])
    missing = str(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=f"no data file at '{missing}'"):
        task_specs([str(write(dataset_kwargs={"data_files": {"test": missing}}))])


def test_progress_counts_the_requests_of_the_harness_and_its_bars_are_not_shown(
    write: Write,
    demo_model: PreTrainedModel,
    demo_tokenizer: PreTrainedTokenizerBase,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tasks = HarnessTasks([str(write())])
    with show_progress("evaluate", every=0):
        tasks.scores(demo_model, demo_tokenizer)
    lines = capsys.readouterr().err.splitlines()
    counts = [line for line in lines if line.startswith("tasks: ")]
    assert counts[-1].startswith("tasks: 32 of 32 requests")  # eight items of four choices
    assert all(line.startswith(("tasks: ", "evaluate: ")) for line in lines)


def test_shipped_files_are_small_and_packaged() -> None:
    files = list(SHIPPED["demo"].iterdir())
    assert sum(file.stat().st_size for file in files) < 100_000
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert '"orchestrator.evaluation" = ["demo_tasks/*"]' in project
    assert {task["task"] for task in task_specs(["demo"]) if isinstance(task, dict)} == {
        file.stem for file in files if file.suffix == ".jsonl"
    }


@pytest.mark.extended
def test_the_script_makes_files_of_the_shipped_kind(tmp_path: Path) -> None:
    """The items are of the standard library, and differ from one patch version of Python to the next."""
    subprocess.run([sys.executable, REPOSITORY / "examples" / "make_tasks.py", tmp_path], check=True, cwd=REPOSITORY)
    made = sorted(tmp_path.glob("*.jsonl"))
    assert len(made) == 3
    for file in made:
        wanted = [json.loads(line) for line in (SHIPPED["demo"] / file.name).read_text().splitlines()]
        own = [json.loads(line) for line in file.read_text().splitlines()]
        assert [set(item) for item in own] == [set(item) for item in wanted]
        assert len(own) == len(wanted)
        common = sum(item in wanted for item in own) / len(own)
        print(f"{file.name}: {common:.0%} of the shipped items")
        assert common > 0.5 or sys.version_info[:2] != (3, 11)


def test_a_checkpoint_in_our_own_format_is_called_by_the_harness_as_it_is(
    write: Write, tmp_path: Path, demo_model: PreTrainedModel, demo_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Separate groups of keys and values: the same scores as the saved model, and other log-probabilities than the
    stock model."""
    layer = LayerPlan((0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2, 3, 0, 1, 2, 3))
    model = convert(demo_model, AttentionPlan((layer,) * 4, head_dim=32))
    saved = checkpoint.save(model, tmp_path / "apart")
    back = checkpoint.load(saved, torch.float32)
    assert back.config.model_type == "headfold_llama"
    tasks = HarnessTasks([str(write())])
    assert tasks.scores(back, demo_tokenizer) == tasks.scores(model, demo_tokenizer)


@pytest.mark.extended
def test_the_verb_runs_a_folder_for_all_three_and_writes_it_down(
    write: Write, tmp_path: Path, demo_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(4000)))
    out = tmp_path / "e.json"
    shared = ["--original", demo_dir, "--baseline", demo_dir, "--eval-data", texts, "--eval-tokens", "512"]
    assert run_here("evaluate", demo_dir, "--tasks", write(), "--json", out, "--speed-tokens", "0", *shared) == 0
    record = json.loads(out.read_text())
    assert record["baseline_loss"] == record["original_loss"] == record["loss"]
    assert set(record["tasks"]) == {"checkpoint", "original", "baseline"}
    assert record["tasks"]["checkpoint"]["few"]["items"] == 8
    assert record["tasks"]["checkpoint"] == record["tasks"]["baseline"]
    assert "few" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metric_list": [{"metric": "wer"}]}, "'wer', which the harness would fetch"),
        ({"unsafe_code": True}, "unsafe_code"),
        ({"dataset_kwargs": {"data_files": {"test": "gone.jsonl"}}}, "gone.jsonl"),
        ({"task": ["a", "b"]}, "no task file"),
        ({"dataset_path": "someone/questions", "dataset_kwargs": None}, "someone/questions"),
    ],
)
def test_what_cannot_be_run_here_is_refused_before_a_model_is_loaded(
    write: Write, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        HarnessTasks([str(write(**changes))])


def test_a_file_that_names_a_program_is_refused_and_does_not_run_it(write: Write) -> None:
    folder = write()
    (folder / "utils.py").write_text("raise SystemExit('it ran')\n")
    (folder / "few.yaml").write_text((folder / "few.yaml").read_text() + "process_docs: !function utils.docs\n")
    with pytest.raises(ConfigError, match="!function"):
        HarnessTasks([str(folder)])


def test_a_template_reaches_nothing_but_its_data(
    write: Write, demo_model: PreTrainedModel, demo_tokenizer: PreTrainedTokenizerBase
) -> None:
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() | length }}"
    tasks = HarnessTasks([str(write())])  # loading asks the first item already
    assert tasks.metrics == {"few": ["acc"]}
    with pytest.raises(ConfigError, match="unsafe"):
        HarnessTasks([str(write(doc_to_text=escape))]).scores(demo_model, demo_tokenizer)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["no_such_task"], "no name that the harness knows"),
        (["gone/folder"], "no file or folder"),
        (["arc_easy"], "cannot be loaded"),
        (["demo", "demo"], "more than once"),
        ([""], "empty name"),
    ],
)
def test_names_that_lead_nowhere(asked: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        HarnessTasks(asked)


def test_without_the_harness_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for asked in ("demo", "arc_easy"):
        with pytest.raises(ConfigError, match="pip install lm-eval"):
            HarnessTasks([asked])


def test_folders_are_found_from_another_folder_and_includes_are_read(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write()
    shared = {key: value for key, value in TASK.items() if key != "task"}
    (folder / "shared.yaml").write_text(yaml.safe_dump(shared))
    (folder / "few.yaml").write_text("include: shared.yaml\ntask: few\ndescription: hello\n")
    monkeypatch.chdir(folder.parent)
    names = with_absolute_paths([folder.name, "demo"])
    monkeypatch.chdir("/")
    assert names == [str(folder), "demo"]
    (task,) = task_specs(names[:1])
    assert isinstance(task, dict)
    assert (task["description"], task["test_split"]) == ("hello", "test")
    assert task["dataset_kwargs"]["data_files"]["test"] == str(folder / "few.jsonl")
