"""Measure what one GPU does with Headfold: `python -m benchmarks.gpu [--device D] [--minutes M] [--again PART]`.

Each part runs in a separate process and is recorded when it has finished; a rerun continues with
missing and failed parts. On a CUDA device docs/gpu.md is written from the records.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import MEASURED, PAGE, page, titles
from benchmarks.records import PartRecord, Records, RecordsError
from benchmarks.report import commit

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600.0
"""Time limit of a part."""
SHORTEST_SECONDS = 45.0
"""Left of `--minutes`, below which no further part begins."""


def parse(words: list[str] | None) -> argparse.Namespace:
    names = list(titles())
    parser = argparse.ArgumentParser(
        prog="make gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu", "fgpu"), default="cuda")
    parser.add_argument("--records", type=Path, help="the file of records (default: that of the device)")
    parser.add_argument("--minutes", type=float, help="stop after so many minutes; the same command continues")
    parser.add_argument("--part-seconds", type=float, default=LIMIT_SECONDS, help="stop a part after so many seconds")
    parser.add_argument("--only", action="append", choices=names, help="a part to run; repeatable")
    parser.add_argument("--again", action="append", choices=names, default=[], help="a part to run although it is done")
    parser.add_argument("--engine", default="vllm", help="engine of the last part (default: vllm)")
    parser.add_argument("--page", action="store_true", help="only write docs/gpu.md from the records of a CUDA device")
    return parser.parse_args(words)


def records_of(arguments: argparse.Namespace) -> Path:
    """The file of records: of a CUDA device in the repository, of others in build/."""
    if arguments.records is not None:
        return arguments.records.absolute()
    return MEASURED if arguments.device == "cuda" else ROOT / "build" / f"gpu-{arguments.device}.json"


def child(arguments: argparse.Namespace, name: str, seconds: float) -> dict[str, Any]:
    """Return the answer of a part's process: `rows`, and `skipped`, `failed` or `late` (stopped) with the reason."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "rows.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.gpu.child", name, arguments.device, str(file), arguments.engine]
        answer: dict[str, Any] = {"rows": []}
        with (
            # In a separate session, so that the commands which a part runs end with it
            subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True) as process,
            log.open("w") as log_file,
        ):
            late = False
            deadline = time.monotonic() + seconds

            def follow() -> None:
                assert process.stderr is not None
                for line in process.stderr:
                    sys.stderr.write(line)
                    log_file.write(line)

            thread = threading.Thread(target=follow, daemon=True)
            thread.start()
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
                os.killpg(process.pid, signal.SIGKILL)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            thread.join(10)
        if file.exists():
            answer = json.loads(file.read_text(encoding="utf-8"))
        if late:
            answer["late"] = f"it took more than {seconds:.0f} s, the limit of this run (`--part-seconds`)"
        elif process.returncode:
            lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
            answer["failed"] = (lines or [f"exit code {process.returncode}"])[-1][:1000]
        return answer


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.page:
        records = Records.read(MEASURED) if MEASURED.exists() else None
        PAGE.write_text(page(records), encoding="utf-8")
        print(f"gpu: {PAGE.relative_to(ROOT)}")
        return 0
    began = time.monotonic()
    description = child(arguments, "--card", 300.0)
    if "card" not in description:
        print(description.get("failed") or description.get("late"), file=sys.stderr)
        return 2
    try:
        records = Records.open(records_of(arguments), description["card"])
    except RecordsError as error:
        print(f"make gpu: {error}", file=sys.stderr)
        return 2
    names = [name for name in titles() if arguments.only is None or name in arguments.only]
    missing = [name for name in names if name in arguments.again or not records.is_done(name)]
    print(f"gpu: {records.card['device']}; {len(missing)} of {len(names)} parts to do", file=sys.stderr, flush=True)
    left_over: list[str] = []
    for index, name in enumerate(missing):
        seconds = arguments.part_seconds
        if arguments.minutes is not None:
            seconds = min(seconds, 60 * arguments.minutes - (time.monotonic() - began))
        if seconds < SHORTEST_SECONDS:
            left_over = missing[index:]
            break
        print(f"gpu: {name}: {titles()[name]}", file=sys.stderr, flush=True)
        started = time.monotonic()
        answer = child(arguments, name, seconds)
        if "late" in answer and seconds < arguments.part_seconds:  # the total limit stopped it: it is run again
            left_over = missing[index:]
            break
        records.add(name, _record(answer, time.monotonic() - started))
        if arguments.device == "cuda" and records.file == MEASURED:
            PAGE.write_text(page(records), encoding="utf-8")
    return _report(records, names, left_over)


def _record(answer: dict[str, Any], seconds: float) -> PartRecord:
    reason = answer.get("failed") or answer.get("late")
    status = "failed" if reason else "skipped" if "skipped" in answer else "done"
    return {
        "status": status,
        "reason": reason or answer.get("skipped", ""),
        "seconds": seconds,
        "date": str(date.today()),
        "commit": commit(),
        "rows": answer["rows"],
    }


def _report(records: Records, names: list[str], left_over: list[str]) -> int:
    """Print how it stands; the exit code: 1 if a part has failed, 3 if the same command is to be run again."""
    for name in names:
        part = records.parts.get(name)
        state = "missing" if part is None else f"{part['status']} {part['reason']}".strip()
        print(f"gpu: {name:20} {state}")
    print(f"gpu: records in {records.file}")
    if left_over:
        print(f"gpu: {len(left_over)} part(s) are left; run the same command again to continue")
        return 3
    return int(any(part["status"] == "failed" for name, part in records.parts.items() if name in names))


if __name__ == "__main__":
    sys.exit(main())
