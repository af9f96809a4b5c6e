"""Programs that end with the process that has started them, however that ends.

That is Ctrl-C, SIGTERM, a closed terminal, or SIGKILL, which no handler sees. A supervisor runs
between the two: a bare Python, which leads a separate process group that contains the program. It
reads from a pipe whose other end only this process has open. When the pipe closes it ends the whole
group.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

_PATIENCE = 10.0
"""Seconds between SIGTERM and SIGKILL for a program that is to end with its parent."""

SUPERVISOR = f"""
import os, signal, subprocess, sys, threading, time

def end_with_parent():
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    time.sleep({_PATIENCE})
    os.killpg(0, signal.SIGKILL)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # which are the program's to answer
    signal.signal(number, lambda *_: None)
program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
threading.Thread(target=end_with_parent, daemon=True).start()
code = program.wait()
if code < 0:  # killed by a signal: so is this
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Child(subprocess.Popen[bytes]):
    """A program that ends with this process.

    It has the program's exit code, and leads the program's group.

    Args:
        others: Of `subprocess.Popen`.

    Raises:
        OSError: If there is no such program.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], **others: Any
    ) -> None:
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(f"there is no program {command[0]!r}")
        supervised = [sys.executable, "-I", "-S", "-c", SUPERVISOR, *command]
        reading, writing = os.pipe()
        # No other child has it, and it closes when this process is gone
        self._lifeline = os.fdopen(writing, "wb")
        try:
            super().__init__(
                supervised, env=dict(environment), stdin=reading, start_new_session=True, **others
            )
        finally:
            os.close(reading)

    def end(self, patience: float = _PATIENCE) -> bool:
        """End the program with all that it has started.

        Returns:
            Whether it needed SIGKILL, which is sent to a process that has not ended `patience`
            seconds after SIGTERM.
        """
        if self.poll() is not None:
            return False
        os.killpg(self.pid, signal.SIGTERM)
        try:
            self.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()
            return True
        return False
