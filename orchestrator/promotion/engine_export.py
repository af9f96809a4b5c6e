"""The promoted model for the engine that a search is for, and loaded in it where it is installed."""

from __future__ import annotations

from pathlib import Path

from attention.io.targets import target
from orchestrator.config.options import ExportOptions
from orchestrator.promotion.state import Entry
from orchestrator.serving.check import CheckError
from orchestrator.serving.engine import EngineError
from orchestrator.serving.engines import engine
from orchestrator.serving.export import export_checkpoint

FOLDER = "served"
TOLD = ("version", "kv_bytes_per_token", "kv_bytes_per_token_promised", "capacity", "memory")
"""Of an engine's check, what a promotion tells."""


def check_engine(entry: Entry, name: str) -> None:
    """Export what the gate has written to target `name`, beside it. Fills in `entry.served` and what the engine has
    shown; adds a reason if the export fails or the engine finds something else. An engine that is not installed is told
    and refuses nothing: the export has been read back and compared all the same."""
    assert entry.model is not None
    out, missing = Path(entry.model).parent / FOLDER, _missing(name)
    options = ExportOptions(checkpoint=entry.model, target=name, out=out, overwrite=True, check=missing is None)
    try:
        record = export_checkpoint(options)
    except (ValueError, CheckError, EngineError) as error:
        entry.reasons.append(f"export to {name} failed: {error}")
        return
    entry.served = str(out)
    entry.checks |= {"target": name, "engine_kv_heads": list(record["kv_heads"])}
    if missing is not None:
        entry.checks["engine"] = f"not checked: {missing}"
        print(f"promotion: {entry.name}: {name} not loaded in its engine: {missing}", flush=True)
        return
    check = record["check"]
    entry.checks |= {"engine": check["engine"]} | {f"engine_{key}": check[key] for key in TOLD}


def _missing(name: str) -> str | None:
    """Why the engine of a target cannot be asked, and how to install it; None if it is there."""
    try:
        engine(target(name).engines[0]).find(None)
    except EngineError as error:
        return str(error)
    return None
