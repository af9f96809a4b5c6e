"""Measure Headfold on a real public model: `python -m benchmarks.real [--all] [--only PART] [--again PART] ...`.

Without `--all` or `--only` the core runs: inspection, conversions, cache formats, llama.cpp, a search. A part is
recorded in the folder when it has finished; a rerun continues with missing and failed parts. docs/real.md and
docs/images/real.png are written from the records of the page, to which those of the folder are added if both are of
one kind of machine. Within a part, finished commands are not run again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from attention.base.timing import duration
from attention.io.dtype_names import full_name
from attention.io.files import sha256
from benchmarks.real import figure
from benchmarks.real.page import CORE, GPU_RECORDS, PAGE, RECORDS, TITLES, page
from benchmarks.real.workspace import CommandError, Unavailable, Workspace
from benchmarks.records import PartRecord, Records, RecordsError, Status
from benchmarks.report import commit, versions
from orchestrator.serving.vllm import VARIABLE
from trainers.text.corpora import DataError, resolve

ROOT = Path(__file__).resolve().parents[2]
ON_OTHER_TEXTS = ("other_text", "calibration", "other_formats", "finetune")
"""Parts that use the texts of the command line."""
SEARCHES = ("learning_rates", "search", "promotion")
"""Parts that train."""
WIKITEXT = {
    "d790b833ef8cf03a": "the test file of WikiText-2",
    "f0737ed31fc1329": "its validation file",
}
"""Beginnings of the digests of texts, and their names on the page."""


def parse(words: list[str] | None) -> argparse.Namespace:
    names = list(TITLES)
    parser = argparse.ArgumentParser(
        prog="make real", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where all is put; 6 GB, in the search 25 GB (default: runs/real, with --quick runs/real-quick)",
    )
    parser.add_argument("--records", type=Path, help="records to add to (default: those of the page)")
    parser.add_argument("--all", action="store_true", help="all parts, also those that compare for hours")
    parser.add_argument("--only", action="append", choices=names, help="a part to run; repeatable")
    parser.add_argument("--again", action="append", choices=names, default=[], help="a part to measure again")
    parser.add_argument("--text", help="a text to measure on too, e.g. the test file of WikiText-2")
    parser.add_argument("--calibration-text", help="another text of that kind, e.g. WikiText-2's validation file")
    parser.add_argument("--quick", action="store_true", help="little text and short fits, recorded in the folder alone")
    parser.add_argument("--page", action="store_true", help="only write docs/real.md and its picture from the records")
    return parser.parse_args(words)


def source(text: str | None) -> str | None:
    """Return a source of text as it is named in any folder: files by their absolute path."""
    return str(Path(text).absolute()) if text and Path(text).exists() else text


def measure(name: str, work: Workspace) -> PartRecord:
    """Run a part, and return its record, also of one that fails.

    Time, date and commit are those of its commands, also of commands that an earlier run has finished.
    """
    from benchmarks.real.parts import PARTS

    work = replace(work, part=name)

    rows: list[dict[str, str]] = []
    status: Status = "done"
    reason = ""
    started = time.monotonic()
    try:
        for row in PARTS[name](work):
            rows.append(row)
            print(f"real: {name}: {', '.join(map(str, row.values()))}", file=sys.stderr, flush=True)
    except Unavailable as error:
        status, reason = "skipped", str(error)
    except CommandError as error:
        status, reason = "failed", str(error)
    except (LookupError, TypeError, ValueError) as error:  # a command's JSON is not what the part reads
        status, reason = "failed", repr(error)
    seconds = time.monotonic() - started
    run = {"date": str(date.today()), "commit": commit()}
    if commands := work.commands():
        seconds = sum(command["wall_seconds"] for command in commands)
        run = {key: commands[-1][key] for key in run}
    return PartRecord(status=status, reason=reason, seconds=seconds, rows=rows, notes=notes_on(name, work), **run)


def notes_on(name: str, work: Workspace) -> list[str]:
    """Return what a part was measured with, where the page does not say it of all parts."""
    notes = [] if work.gpu else [f"cores with {torch.backends.cpu.get_cpu_capability()}"]
    if name in ON_OTHER_TEXTS and work.text is not None:
        texts = [work.text] if work.calibration_text is None else [work.text, work.calibration_text]
        notes.append(f"texts: {', '.join(map(title, texts))}")
    if name in SEARCHES:
        from benchmarks.real.parts import search_changes

        notes.append(f"trained in {full_name(search_changes(work).get('train.dtype', 'float32'))}")
    return notes


def title(text: str) -> str:
    """Return the name of a text on the page."""
    if not Path(text).is_file():
        return text
    digest = sha256(Path(text))
    return next((name for start, name in WIKITEXT.items() if digest.startswith(start)), Path(text).name)


def shared_records(file: Path | None, card: dict[str, str], gpu: bool) -> Records | None:
    """Return the records to which the folder's are added: `file`, or those of the page if of such a machine.

    Raises:
        RecordsError: If `file` has the records of another machine.
    """
    if file is not None:
        return Records.open(file.absolute(), card)
    try:
        return Records.open(GPU_RECORDS if gpu else RECORDS, card)
    except RecordsError:
        print(f"real: docs/real.md is of another machine than {card['device']}, and is not written", file=sys.stderr)
        return None


def time_on_the_page(names: Sequence[str]) -> str:
    """Return the number of parts, and how long they took when docs/real.md was measured, if that is known."""
    parts = Records.read(RECORDS).parts if RECORDS.exists() else {}
    times = {name: parts[name]["seconds"] for name in names if name in parts and parts[name]["seconds"] >= 1}
    longest = sorted(times, key=lambda name: -times[name])[:3]
    words = ", ".join(f"{name} {duration(times[name])}" for name in longest)
    whole = f"{len(names)} part{'s' * (len(names) != 1)}"
    return f"{whole}, {duration(sum(times.values()))} when the page was measured ({words})" if times else whole


def write_page() -> tuple[Path, Path]:
    """Write docs/real.md and its picture from the records, and return their files."""
    records = Records.read(RECORDS)
    PAGE.write_text(page(records, Records.read(GPU_RECORDS) if GPU_RECORDS.exists() else None), encoding="utf-8")
    return PAGE, figure.write(records)


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.page:
        for file in write_page():
            print(f"real: {file.relative_to(ROOT)}")
        return 0
    folder = (arguments.folder or ROOT / "runs" / ("real-quick" if arguments.quick else "real")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    card = {"device": gpu or f"{os.cpu_count()} CPU cores", "software": versions()}
    texts = source(arguments.text), source(arguments.calibration_text)
    work = Workspace(folder, arguments.quick, *texts, gpu=gpu is not None)
    if os.sep in (python := os.environ.get(VARIABLE, "")):  # commands run in the folder; a bare name is of PATH
        os.environ[VARIABLE] = str(Path(python).absolute())
    try:
        for text in filter(None, texts):
            resolve(text)
        records = Records.open(folder / "records.json", card)
        shared = None if arguments.quick else shared_records(arguments.records, card, work.gpu)
    except (RecordsError, DataError) as error:
        print(f"make real: {error}", file=sys.stderr)
        return 2
    chosen = TITLES if arguments.all else arguments.only or arguments.again or CORE
    names = [name for name in TITLES if name in (*chosen, *arguments.again)]
    missing = [name for name in names if name in arguments.again or not records.is_done(name)]
    if missing and not arguments.quick:
        print(f"real: {time_on_the_page(missing)}", file=sys.stderr, flush=True)
    for number, name in enumerate(missing, 1):
        print(f"real: {name}: {TITLES[name]} ({number} of {len(missing)})", file=sys.stderr, flush=True)
        if name in arguments.again:
            replace(work, part=name).forget()
        part = measure(name, work)
        records.add(name, part)
        # What is not possible here does not replace what was measured elsewhere
        if shared is not None and not (part["status"] == "skipped" and shared.is_done(name)):
            if part["status"] == "failed" and shared.is_done(name):
                reason = f"{part['date']}, commit {part['commit']}: {part['reason']}"
                part = shared.parts[name].copy()
                part["reason"] = reason
            shared.add(name, part)
            if shared.file in (RECORDS, GPU_RECORDS) and RECORDS.exists():
                write_page()
    for name in names:
        part = records.parts[name]
        print(f"real: {name:16} {part['status']} {part['reason']}".rstrip())
    print(f"real: records in {records.file}")
    return int(any(records.parts[name]["status"] == "failed" for name in names))


if __name__ == "__main__":
    sys.exit(main())
