"""Where a search was made: the check before it is continued, and the warning of its pickles.

Weights, plans, tokens and records are safetensors, JSON and YAML: reading them runs nothing.
Training checkpoints are DeepSpeed's, which are pickles: reading one can run anything. They are read
when a search is resumed or promoted from.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from orchestrator.config.parsing import ConfigError
from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import read_if_there
from orchestrator.storage.mirror import is_remote
from orchestrator.storage.paths import SearchFolder, storage_path


def check_origin(folder: SearchFolder) -> None:
    """Check that a search is where it was made: its records name files by their paths.

    Warn on standard error if its training checkpoints may be from elsewhere, before they are read.

    Raises:
        ConfigError: If it is at another path, or does not find its address from here.
    """
    made_as = read_if_there(folder.origin).get("folder")
    if made_as is not None and Path(made_as).resolve() != folder.root.resolve():
        raise ConfigError(
            f"{folder.root} was made as {made_as}, and its records name files there; continue or "
            "promote it at that path (for an address, with the same HEADFOLD_HOME)"
        )
    storage = str(folder.stored().get("storage"))
    if is_remote(storage) and folder.address is None:
        raise ConfigError(
            f"{folder.root} belongs to {storage}, whose working folder here is "
            f"{storage_path(storage)}; set HEADFOLD_HOME as for the search"
        )
    if reasons := doubts(folder):
        print(
            f"warning: {folder.root}: {'; '.join(reasons)}. Its training checkpoints are pickles, "
            "which can run any program when they are read: continue only if you trust whoever made "
            "them",
            file=sys.stderr,
            flush=True,
        )


def doubts(folder: SearchFolder) -> list[str]:
    """Return why the training checkpoints of a search may not be this user's own."""
    reasons = []
    if read_if_there(folder.origin).get("folder") is None:
        reasons.append("it does not say where it was made")
    user = os.getuid() if hasattr(os, "getuid") else None
    owner = folder.root.stat().st_uid
    if user is not None and owner not in (user, 0):
        reasons.append(f"it belongs to user {owner}")
    root = folder.root.resolve()
    for trial in load_trials(folder.root):
        path = trial.last.get("checkpoint_path")
        if path and not Path(str(path)).resolve().is_relative_to(root):
            reasons.append(f"a trial's checkpoint is outside it, at {path}")
            break
    return reasons
