"""The three changes of docs/changes.md: each touches the files that CONTRIBUTING.md names, and does what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from parameters import extended

REPOSITORY = Path(__file__).resolve().parents[2]
COPIED = (
    "headfold",
    "attention",
    "search_spaces",
    "trainers",
    "orchestrator",
    "docs",
    "configs",
    "tests",
    "examples",
    "benchmarks",
)
TABLE = "## Which files a change touches"

SHOWN = {
    "A grouping": """
import pytest
test = "tests/search_spaces/planning/test_planning.py::test_every_grouping_makes_the_requested_groups"
assert pytest.main(["-q", "-p", "no:cacheprovider", f"{test}[strided]"]) == 0
""",
    "An option of a verb": """
from orchestrator import main
from orchestrator.config.options import ConvertOptions
from orchestrator.tasks import convert
convert.print_conversion = lambda record, out: None
convert.Convert(ConvertOptions(model="any", print_digest=True)).show({"plan_digest": "0123abcd"})
main.run(["convert", "--help"])
""",
    "A field of a trial's report": """
import torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from attention.io import checkpoint
from orchestrator import main
from orchestrator.search.candidates import Candidate
from orchestrator.search.trials.context import TrialContext
from orchestrator.search.trials.untrained import untrained_facts
from orchestrator.storage import records
from search_spaces.recipes.catalogue import recipe
from trainers.settings import TrainSettings
from trainers.text.data import write_sequences

shape = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=4, bos_token_id=None, eos_token_id=None)
checkpoint.save(LlamaForCausalLM(LlamaConfig(**shape)), "model")
write_sequences(torch.arange(64).reshape(4, 16), "tokens")
texts = dict(train_file="tokens", eval_file="tokens", calibration_file="tokens", calibration_cache="cache")
context = TrialContext(folder=".", model="model", dtype="float32", rungs=(0,), original_loss=4.0,
                       train=TrainSettings(batch_size=2).model_dump(mode="json"), **texts)
candidate = Candidate(recipe("gqa"), 0.5, 1e-3)
Path("trials/t1").mkdir(parents=True)
report = untrained_facts(candidate, context, Path("trials/t1"))
record = records.TrialRecord.of("t1", candidate.config())
record.add(report | {"rung": 0})
assert record.peak_memory == report["peak_memory"] > 10e6
from orchestrator.storage.journal import END, REPORT, TRIAL, Journal
journal = Journal(Path("journal.jsonl"))
journal.begin(1)
journal.append(TRIAL, trial="t1", config=candidate.config())
journal.append(REPORT, trial="t1", result=report | {"rung": 0}, decision="CONTINUE")
journal.append(END, trial="t1", error=None, trace=None, lost=False)
Path("search.yaml").write_text("name: small\\n")
main.run(["watch", ".", "--json", "-"])
""",
}
"""By the heading of a change: a program that runs in the copy."""
PRINTED = {
    "An option of a verb": ["plan: 0123abcd", "--print-digest"],
    "A field of a trial's report": ['"peak_memory": '],
}


def changes() -> dict[str, str]:
    """Return the diff below each heading of the page."""
    page = (REPOSITORY / "docs" / "changes.md").read_text()
    return dict(re.findall(r"^## (.+?)\n.*?```diff\n(.*?)```", page, re.MULTILINE | re.DOTALL))


def hunks(diff: str) -> Iterator[tuple[str, str, str]]:
    """Yield file, text before and text after of each hunk; a new file has nothing before."""
    for name, body in re.findall(r"^\+\+\+ (\S+)\n((?:(?!---).*\n)+)", diff, re.MULTILINE):
        for hunk in re.split(r"^@@.*\n", body, flags=re.MULTILINE):
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] in " -")
            after = "".join(line[1:] for line in lines if line[0] in " +")
            if lines:
                yield name, before, after


def apply(diff: str, root: Path) -> None:
    """Change the files below `root` as a diff says. Its hunks need no line numbers: what they change is found once."""
    for name, before, after in hunks(diff):
        file = root / name
        text = "" if not before else file.read_text()
        assert text.count(before) == 1, f"{name} has no longer, or more than once:\n{before}"
        file.write_text(text.replace(before, after) if before else after)


def digests(root: Path) -> dict[str, bytes]:
    """Return the files of a copy with what is in them."""
    folders = (path for folder in COPIED for path in (root / folder).rglob("*"))
    files = (path for path in (*root.glob("*.*"), *folders) if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files if "__pycache__" not in path.parts}


def promised() -> list[set[str]]:
    """Return the files of each row of CONTRIBUTING's table."""
    section = (REPOSITORY / "CONTRIBUTING.md").read_text().partition(TABLE)[2].partition("\n## ")[0]
    rows = re.findall(r"^\|[^|]*\|(.*)\|$", section, re.MULTILINE)[2:]
    return [set(re.findall(r"`([\w./]+/[\w./]+)`", row)) for row in rows]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as it is, less what is large; what Python has compiled is valid in the copy too."""
    folder = tmp_path_factory.mktemp("changes") / "copy"
    ignored = shutil.ignore_patterns(".ruff_cache", "*.safetensors", "*.png")
    for name in COPIED:
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    for file in (REPOSITORY / "pyproject.toml", *REPOSITORY.glob("*.md")):
        shutil.copy(file, folder)
    return folder


def test_each_change_has_its_row_and_its_use() -> None:
    assert list(changes()) == list(SHOWN)
    assert [{name for name, *_ in hunks(diff)} for diff in changes().values()] == promised()


@pytest.mark.parametrize("heading", [extended(heading) for heading in SHOWN])
def test_a_change_touches_these_files_alone_and_shows(heading: str, copy: Path, tmp_path: Path) -> None:
    root, diff = tmp_path / "copy", changes()[heading]
    shutil.copytree(copy, root)
    before = digests(root)
    apply(diff, root)
    written = digests(root)
    run = [sys.executable, "-c", "import runpy; runpy.run_path('docs/reference.py', run_name='__main__')"]
    environment = {"PYTHONPATH": f"{root}:{root / 'tests' / 'helpers'}", "PATH": "/usr/bin:/bin", "COLUMNS": "100"}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(run, cwd=root, env=environment, check=True, capture_output=True)
    after = digests(root)
    assert {name for name in after if after[name] != written.get(name)} == set(), "`make docs` changes more"
    assert {name for name in after if after[name] != before.get(name)} == {name for name, *_ in hunks(diff)}
    work = tmp_path / "work"
    work.mkdir()
    where = root if heading == "A grouping" else work
    done = subprocess.run(
        [sys.executable, "-c", SHOWN[heading]], cwd=where, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in PRINTED.get(heading, []):
        assert words in done.stdout


def test_a_hunk_that_fits_nowhere_or_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\none\n")
    apply("--- a.txt\n+++ a.txt\n@@\n one\n-two\n+2\n", tmp_path)
    assert (tmp_path / "a.txt").read_text() == "one\n2\none\n"
    for line in ("one", "three"):
        with pytest.raises(AssertionError, match=r"a\.txt has no longer"):
            apply(f"--- a.txt\n+++ a.txt\n@@\n {line}\n+more\n", tmp_path)
