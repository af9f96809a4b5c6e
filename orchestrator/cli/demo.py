"""The verb `demo`: what Headfold does, shown on the checkpoint that comes along."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import runner
from orchestrator.cli.usage import SEARCH_PACKAGES, check_packages
from orchestrator.config import options

CONFIG, MODEL, READER = "configs/demo.yaml", "examples/stdlib-llama/config.json", "examples/load_exported.py"


def demo(
    overrides: options.ConfigOverrides = None,
    storage: Annotated[Path, typer.Option(help="Folder for all that the demo writes.")] = Path("runs/demo"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue a demo that was stopped.")] = False,
    path: Annotated[bool, typer.Option("--path", help="Print the folder of that checkpoint, and end.")] = False,
) -> None:
    """Search, promote and export on a small checkpoint. It comes along; the export is loaded in transformers and
    llama.cpp."""
    from orchestrator.config.schema import read_search_config
    from orchestrator.storage.shipped import shipped

    config, model = shipped(CONFIG), shipped(MODEL).parent
    if path:
        print(model)
        return
    check_packages("demo", *SEARCH_PACKAGES)
    settings = read_search_config(config, [f"model.path={model}", f"storage={storage}", *(overrides or [])])
    from orchestrator.pipeline import search as run_search
    from orchestrator.reporting.promoted_models import promoted_models

    print(f"demo: searching {config}, results in {settings.storage}", flush=True)
    outcome = run_search(settings, resume=resume)
    runner.finish(outcome.to_dict(), Path(settings.storage) / "outcome.json")
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
    exported = (outcome.promotion or {}).get("exported")
    if exported is None:
        print("demo: nothing was promoted that stock software loads, so there is no export to load")
        return
    print("demo: loading the export with plain transformers, in a process that cannot import Headfold", flush=True)
    subprocess.run([sys.executable, str(shipped(READER)), exported], check=True)
    best = promoted_models(outcome.promotion)[0]  # by its recipe, often one with a head count of its own in each layer
    _load_in_llama_cpp(Path(best["path"]), best["label"], Path(settings.storage) / "gguf")
    print(f"demo: exported checkpoint  {exported}")


def _load_in_llama_cpp(promoted: Path, recipe: str, out: Path) -> None:
    from orchestrator.config.options import ExportOptions
    from orchestrator.serving.export import export_checkpoint
    from orchestrator.serving.tables import print_check

    engine = find_spec("xllamacpp") is not None
    loaded = "loaded there and compared" if engine else "not loaded there, for lack of it: pip install xllamacpp"
    print(f"demo: the best model of the smallest cache, by {recipe}, as one file for llama.cpp, {loaded}", flush=True)
    record = export_checkpoint(ExportOptions(checkpoint=promoted, target="gguf", out=out, check=engine, overwrite=True))
    print(record["format_note"])
    if record["check"]:
        print_check(record["check"])
