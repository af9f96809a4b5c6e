"""The promoted model for the engine that a search is for, loaded there if it is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

from attention.io.targets import target
from orchestrator.config.options import ExportOptions
from orchestrator.serving.check import CheckError
from orchestrator.serving.engine import EngineError, EngineFailure
from orchestrator.serving.engines import engine
from orchestrator.serving.export import export_checkpoint
from orchestrator.storage.promotion_record import GateChecks

FOLDER = "served"


def export_for_engine(
    model: str, name: str, trial_name: str
) -> tuple[str | None, GateChecks, str | None]:
    """Export a checkpoint to target `name`, into a folder next to it, and load it in the engine.

    An engine that is not installed is reported and refuses nothing: the export has been read back
    and compared all the same.

    Returns:
        The folder, what was measured, and None; without a folder, the reason why the export failed
        or the engine refused it.
    """
    out = Path(model).parent / FOLDER
    # A killed promotion may have left files that are not in its list of digests
    shutil.rmtree(out, ignore_errors=True)
    missing = _missing(name)
    options = ExportOptions(
        checkpoint=model, target=name, out=out, overwrite=True, check=missing is None
    )
    try:
        record = export_checkpoint(options)
    except (ValueError, CheckError, EngineFailure) as error:
        return None, {}, f"export to {name} failed: {error}"
    checks: GateChecks = {"target": name, "engine_kv_heads": list(record["kv_heads"])}
    if missing is not None:
        checks["engine"] = f"not checked: {missing}"
        print(f"promotion: {trial_name}: {name} not loaded in its engine: {missing}", flush=True)
        return str(out), checks, None
    check = record["check"]
    checks["engine"] = check["engine"]
    checks["engine_version"] = check["version"]
    checks["engine_kv_bytes_per_token"] = check["kv_bytes_per_token"]
    checks["engine_kv_bytes_per_token_promised"] = check["kv_bytes_per_token_promised"]
    checks["engine_capacity"] = check["capacity"]
    checks["engine_memory"] = check["memory"]
    return str(out), checks, None


def _missing(name: str) -> str | None:
    """Return why the engine of a target cannot run, and how to install it; None if it is there."""
    try:
        engine(target(name).engines[0]).find(None)
    except EngineError as error:
        return str(error)
    return None
