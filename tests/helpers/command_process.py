"""The command line in another process, one and the same for all commands of a test file: starting one takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LOOP = """
import json, os, sys, tempfile
if hidden := sys.argv[1:]:
    sys.path.append("tests/helpers")
    from hidden_packages import hide
    hide(hidden)
from orchestrator import main

answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        os.dup2(out.fileno(), 1)  # not sys.stdout alone: loggers and libraries have theirs
        os.dup2(error.fileno(), 2)
        try:
            main.run(json.loads(line))
        except SystemExit as ended:
            code = ended.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
        told = [file.seek(0) or file.read() for file in (out, error)]
    print(json.dumps([code, *told]), file=answers, flush=True)
"""


class CommandProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Exit code and output of `headfold` with these arguments."""
        assert self._process.stdin and self._process.stdout
        command = [str(a) for a in arguments]
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process of the commands ended with {self._process.wait()}"
        return subprocess.CompletedProcess(command, *json.loads(answer))


@contextmanager
def commands(environment: Mapping[str, str], hidden: Collection[str] = ()) -> Iterator[CommandProcess]:
    """`run(*arguments)`, in a process with this much more in its environment and without the packages `hidden`."""
    with subprocess.Popen(
        [sys.executable, "-c", LOOP, *hidden],
        cwd=REPOSITORY,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield CommandProcess(process)
