"""Verbs of a search: run it, promote from it, tell about it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli import runner
from orchestrator.cli.estimates import tell_search
from orchestrator.cli.usage import SEARCH_PACKAGES, check_packages
from orchestrator.config import options

if TYPE_CHECKING:
    from orchestrator.config.schema import SearchConfig


def search(
    config: options.ConfigFile,
    overrides: options.ConfigOverrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the newest search of this name; with a NAME after it the one in that folder, e.g. demo-2.",
        ),
    ] = False,
    dry_run: options.DryRun = False,
    json: options.JsonFile = None,
) -> None:
    """Run a search: trials, front, promotion, report."""
    from orchestrator.config.schema import ConfigError, read_search_config

    changes, named = _split(overrides or [], resume)
    settings = read_search_config(config, changes)  # before the imports below: a mistake is told in a second
    check_packages("search", *SEARCH_PACKAGES)
    from orchestrator.storage.outputs import check_results

    check_results(json)
    if dry_run:
        if resume:
            raise ConfigError("dry_run: a search that goes on was checked when it began; leave out --resume")
        _rehearse(settings)
        return
    from orchestrator.pipeline import search as run_search

    outcome = run_search(settings, resume=named or resume)
    runner.finish(outcome.to_dict(), json)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def _rehearse(settings: SearchConfig) -> None:
    from orchestrator.search.estimate import check_disk, local_parallel
    from orchestrator.search.validation import check_epochs, open_models, rehearse_search
    from orchestrator.storage.paths import SearchFolder, storage_path

    settings = open_models(settings, weights=False)
    prepared = rehearse_search(settings)
    check_epochs(settings)
    tell_search(settings)
    check_disk(settings, prepared, local_parallel(settings))
    storage = storage_path(settings.storage)
    place = SearchFolder.free_place(storage, settings.name)
    if place.name == settings.name:
        runner.rehearsed({"folder": str(place)})
        return
    taken = f"{settings.name!r} is there already; --resume goes on with the newest search of that name"
    runner.rehearsed({"folder": f"{place} ({taken})"})


def _split(words: list[str], resume: bool) -> tuple[list[str], str | None]:
    """The overrides among some words, and the search that --resume names: the one word that is no override."""
    from orchestrator.config.parsing import ConfigError

    names = [word for word in words if "=" not in word or (Path(word) / "search.yaml").is_file()] if resume else []
    if len(names) > 1:
        raise ConfigError(f"--resume: got the names {' and '.join(names)}; give one")
    return [word for word in words if word not in names], next(iter(names), None)


def promote(
    search: Annotated[Path, typer.Argument(help="Folder of a search, e.g. runs/demo/demo.")],
    trial: Annotated[list[str] | None, typer.Option(help="Trial id to promote; may be given several times.")] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Promote the K best at each KV ratio.")] = None,
    dry_run: options.DryRun = False,
    json: options.JsonFile = None,
) -> None:
    """Train chosen trials fully, pass the gate, register. Finished steps are not repeated."""
    from orchestrator.storage.outputs import check_results
    from orchestrator.storage.paths import SearchFolder

    check_results(json)
    SearchFolder.existing(search)  # before the imports below: a mistake is told in a second
    check_packages("promote", *SEARCH_PACKAGES)
    from orchestrator.promotion.promote import promote_search

    if dry_run:
        from orchestrator.promotion.rehearsal import rehearse_promotion

        runner.rehearsed(rehearse_promotion(search, trials=trial or [], top=top))
        return
    outcome = promote_search(search, trials=trial or [], top=top)
    runner.finish(outcome.to_dict(), json)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def watch(
    search: Annotated[Path, typer.Argument(help="Folder of a search, e.g. runs/demo/demo.")],
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", help="Look once, write one JSON object to this file; - prints it alone.")
    ] = None,
) -> None:
    """Watch a search: trials, front so far, spent and left. Reads files only."""
    import json as encoder

    from orchestrator.reporting import status
    from orchestrator.storage.outputs import check_results
    from orchestrator.storage.paths import SearchFolder

    folder = SearchFolder.existing(search)
    if json is not None and str(json) == "-":
        print(encoder.dumps(asdict(status.read_status(folder)), indent=1))
        return
    check_results(json)
    runner.finish(asdict(status.watch_search(folder, every=every, once=once or json is not None)), json)


def report(
    search: Annotated[Path, typer.Argument(help="Folder of a search.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; report.html in the folder by default.")] = None,
    json: options.JsonFile = None,
) -> None:
    """Write one page of a search: promoted models, front, trials. It needs no other file, and no network."""
    from orchestrator.storage.outputs import check_results
    from orchestrator.storage.paths import SearchFolder

    check_results(json, page=out)
    SearchFolder.existing(search)  # before the imports below: a mistake is told in a second
    from orchestrator.reporting.console import print_comparison
    from orchestrator.reporting.pages.report_page import write_report

    written = write_report(search, out)
    print_comparison(written["comparison"])
    print(f"report: {written['report']}")
    runner.finish(written, json)


def ui(
    search: Annotated[Path, typer.Argument(help="Folder of a search, e.g. runs/demo/demo.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of this machine's loopback address.")] = 5000,
) -> None:
    """Serve MLflow's page of a search at http://127.0.0.1:PORT until Ctrl-C, and print its address."""
    from orchestrator.storage.paths import SearchFolder
    from orchestrator.tracking.ui import serve_page

    check_packages("ui", "mlflow")
    serve_page(SearchFolder.existing(search), port)
