"""What is read from a folder that somebody may have got from elsewhere, and the warning before it.

Weights, plans, tokens and records are safetensors, JSON and YAML: reading them runs nothing. Training checkpoints are
DeepSpeed's, which are pickles: reading one can run anything. They are read when a search is resumed or promoted from.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from orchestrator.storage.journal import load_trials
from orchestrator.storage.json_files import read_json
from orchestrator.storage.paths import SearchFolder


def doubts(folder: SearchFolder) -> list[str]:
    """Why the training checkpoints of a search may not be this user's own; empty if nothing speaks for it."""
    made = (read_json(folder.origin) if folder.origin.exists() else {}).get("folder")
    reasons = []
    if made != str(folder.root):
        reasons.append(f"it was made as {made}" if made else "it does not say where it was made")
    user = getattr(os, "getuid", lambda: None)()
    if user is not None and folder.root.stat().st_uid not in (user, 0):
        reasons.append(f"it belongs to user {folder.root.stat().st_uid}")
    root, paths = folder.root.resolve(), [trial.last.get("checkpoint_path") for trial in load_trials(folder.root)]
    if outside := [path for path in paths if path and not Path(str(path)).resolve().is_relative_to(root)]:
        reasons.append(f"a trial's checkpoint lies outside of it, at {outside[0]}")
    return reasons


def warn_of_pickles(folder: SearchFolder) -> bool:
    """Say so on standard error before training checkpoints of a folder are read that may come from elsewhere."""
    reasons = doubts(folder)
    if reasons:
        print(
            f"warning: {folder.root}: {'; '.join(reasons)}. Its training checkpoints are pickles, which can run any "
            "program when they are read: go on only if you trust whoever made them",
            file=sys.stderr,
            flush=True,
        )
    return bool(reasons)
