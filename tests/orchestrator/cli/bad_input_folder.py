"""The folder in which bad inputs are tried: tiny checkpoints, a text, a search that has ended, and other people's work.

Also the run of a command in it, in this process, and a digest that shows whether anything has changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml
from journals import write_journal

from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from orchestrator import main
from orchestrator.config.schema import parse_config
from orchestrator.storage import records
from orchestrator.storage.json_files import write_json
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import TrialRecord

HALF = LayerPlan((0, 0, 1, 1), (0, 0, 1, 1))
UNEVEN = LayerPlan((0, 1, 1, 1), (0, 0, 0, 1))
CONFIG: dict[str, Any] = {
    "name": "mine",
    "model": {"path": "model"},
    "data": {
        "source": "texts/notes.txt",
        "sequence_length": 32,
        "train": {"tokens": 320},
        "eval": {"tokens": 64},
        "calibration": {"tokens": 64},
    },
    "search": {"recipes": ["gqa", "headfold_gqa"], "kv_ratios": [0.5]},
    "rungs": {"steps": [0, 2]},
    "train": {"batch_size": 2, "dtype": "fp32", "cpus_per_worker": 0.4},
    "storage": "runs",
}


def make_folder(root: Path, home: Path, tiny_model: Callable[..., Any]) -> None:
    """Fill an empty folder, of which copies will be used at `home`. `tiny_model`: as the fixture of that name."""
    tokenizer = byte_tokenizer()
    model = tiny_model("llama", vocab_size=257)
    checkpoint.save(model, root / "model", tokenizer)
    checkpoint.save(tiny_model("llama", vocab_size=257, num_key_value_heads=2), root / "grouped", tokenizer)
    uneven = convert(model, AttentionPlan((UNEVEN, UNEVEN), head_dim=8))
    checkpoint.save(uneven, root / "uneven", tokenizer)
    (root / "texts").mkdir()
    lines = [f"Paragraph {n}: heads that are alike may share what they keep, {n * n} times." for n in range(300)]
    (root / "texts" / "notes.txt").write_text("\n\n".join(lines))
    (root / "mine.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    _make_search(root, home)
    work = root / "work"
    (work / "deep").mkdir(parents=True)
    (work / "thesis.md").write_text("years of work\n")
    (work / "deep" / "data.bin").write_bytes(bytes(range(256)))
    (work / "run.sh").write_text("#!/bin/sh\n")
    (work / "run.sh").chmod(0o755)
    (work / "link").symlink_to("deep/data.bin")
    (root / "empty").mkdir()


def byte_tokenizer() -> Any:
    """A tokenizer of 256 bytes and an end token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<end>"])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def _make_search(root: Path, home: Path) -> None:
    """A search of two trials that has ended, as far as what reads it looks."""
    folder = SearchFolder.fresh(root / "runs", "mine")
    stored = parse_config(CONFIG).model_dump(mode="json")
    folder.snapshot.write_text(yaml.safe_dump(stored, sort_keys=False))
    write_json(folder.origin, {"folder": str(home / "runs" / "mine")})
    write_json(folder.original, {"loss": 5.0, "kv_bytes_per_token": 512, "model": "model"})
    write_json(folder.state, {"parent_run": "none", "started": "2026-01-01T12:00:00+00:00", "ended": "done"})
    rungs = [{"step": 0, "loss": 5.5, "kl": 0.5, "tokens": 0}, {"step": 2, "loss": 5.4, "kl": 0.4, "tokens": 128}]
    trials = [
        TrialRecord("gqa-0", "gqa", 0.5, 1e-3, {}, records.DONE, rungs, kv_bytes_per_token=256),
        TrialRecord("headfold_gqa-1", "headfold_gqa", 0.5, 1e-3, {}, records.DONE, rungs, kv_bytes_per_token=256),
    ]
    write_journal(folder.root, trials)


def digest(root: Path) -> dict[str, str]:
    """Entries of a folder: kind, mode, and content or target of a link, by relative name."""
    result = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        content = "folder"
        if stat.S_ISLNK(mode):
            content = f"link to {path.readlink()}"
        elif stat.S_ISREG(mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        result[path.relative_to(root).as_posix()] = f"{stat.filemode(mode)} {content}"
    return result


@dataclass(frozen=True)
class Ran:
    """The result of a command: its exit code and its output."""

    code: int
    out: str
    err: str


def run_in(folder: Path, arguments: list[str]) -> Ran:
    """`headfold ARGUMENTS` in this process, with `folder` as the current one."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with _captured() as report:
            try:
                main.run(arguments)
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            else:
                code = 0
        return Ran(code, *report)
    finally:
        os.chdir(before)


@functools.cache
def _streams() -> tuple[TextIO, TextIO]:
    """The captured output; open for the whole process, since a library's logger keeps the stream that it has found."""
    return tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """The output to stdout and stderr, by Python and below it; filled at the end."""
    report: list[str] = []
    out, err = _streams()
    stored = [(number, os.dup(number), stream) for number, stream in ((1, out), (2, err))]
    for number, _, stream in stored:
        os.dup2(stream.fileno(), number)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield report
    finally:
        for number, copy, stream in stored:
            os.dup2(copy, number)
            os.close(copy)
            stream.flush()
            stream.seek(0)
            report.append(stream.read())
            stream.seek(0)
            stream.truncate()


def fresh_copy(template: Path, target: Path) -> Path:
    """The folder as it was made, links as links."""
    if target.exists():
        shutil.rmtree(target)
    return Path(shutil.copytree(template, target, symlinks=True))


def edit_json(file: Path, **changes: Any) -> None:
    """Change keys of a JSON object in a file; None takes one away."""
    record = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in record.items() if value is not None}))


def edit_weights(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a safetensors file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
