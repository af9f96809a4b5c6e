"""`headfold demo`: a demonstration of Headfold on a small checkpoint of the package."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import typer

from orchestrator.config.options import DemoOptions
from orchestrator.config.schema import read_search_config
from orchestrator.storage.outputs import write_result
from orchestrator.storage.shipped import shipped
from orchestrator.tasks.packages import SEARCH_PACKAGES, check_packages

CONFIG = "configs/demo.yaml"
MODEL = "examples/stdlib-llama/config.json"
READER = "examples/load_exported.py"


def demo(options: DemoOptions) -> None:
    """Search, promote and export, then load the export in software that knows no Headfold."""
    config, model = shipped(CONFIG), shipped(MODEL).parent
    if options.path:
        print(model)
        return
    check_packages("demo", *SEARCH_PACKAGES)
    # Changes are YAML, in which a path may be a number or contain a comment
    quoted = [json.dumps(str(path), ensure_ascii=False) for path in (model, options.storage)]
    changes = [f"model.path={quoted[0]}", f"storage={quoted[1]}", *(options.overrides or [])]
    settings = read_search_config(config, changes)
    from orchestrator.pipeline import search
    from orchestrator.reporting.promoted_models import promoted_models

    print(f"demo: searching {config}, results in {settings.storage}", flush=True)
    outcome = search(settings, resume=options.resume)
    write_result(Path(settings.storage) / "outcome.json", outcome.to_dict())
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
    exported = (outcome.promotion or {}).get("exported")
    if exported is None:
        print("demo: no promoted model loads in stock transformers, so no export is loaded")
        return
    print(
        "demo: loading the export in plain transformers, in a process without Headfold",
        flush=True,
    )
    subprocess.run([sys.executable, str(shipped(READER)), exported], check=True)
    # By its recipe, often one with a different head count in each layer
    best = promoted_models(outcome.promotion)[0]
    _load_in_llama_cpp(Path(str(best["path"])), best["label"], Path(settings.storage) / "gguf")
    print(f"demo: exported checkpoint  {exported}")


def _load_in_llama_cpp(promoted: Path, recipe: str, out: Path) -> None:
    from orchestrator.config.options import ExportOptions
    from orchestrator.serving.export import export_checkpoint
    from orchestrator.serving.tables import print_check

    engine = find_spec("xllamacpp") is not None
    loaded = (
        "loaded and compared there"
        if engine
        else "not loaded, as llama.cpp is not installed: pip install xllamacpp"
    )
    print(
        f"demo: exporting the best model of the smallest cache ({recipe}) for llama.cpp, {loaded}",
        flush=True,
    )
    record = export_checkpoint(
        ExportOptions(checkpoint=promoted, target="gguf", out=out, check=engine, overwrite=True)
    )
    print(record["format_note"])
    if record["check"]:
        print_check(record["check"])
