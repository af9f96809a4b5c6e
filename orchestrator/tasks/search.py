"""`headfold search`: a search, new or resumed, from its configuration to its report.

A wrong key of the configuration is reported before slow libraries are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.options import SearchOptions
from orchestrator.config.schema import ConfigError, SearchConfig, read_search_config
from orchestrator.tasks.packages import SEARCH_PACKAGES, check_packages
from orchestrator.tasks.task import Task, require

if TYPE_CHECKING:
    from orchestrator.search.outcome import SearchOutcome


class Search(Task[SearchOptions, Mapping[str, Any]]):
    """One search.

    Attributes:
        outcome: The result, once it has run.
    """

    outcome: SearchOutcome

    @cached_property
    def config(self) -> SearchConfig:
        """The configuration with the overrides of the command line, checked by itself."""
        return read_search_config(self.options.config, self._words[0])

    @cached_property
    def _words(self) -> tuple[list[str], str | None]:
        """The overrides, and the search that `--resume` names."""
        words, resume = list(self.options.overrides or ()), self.options.resume
        if isinstance(resume, str):
            return words, resume
        return split_overrides(words, resume)

    def check(self) -> None:
        check_packages("search", *SEARCH_PACKAGES)
        require(self.config)
        if self.rehearsal and self.options.resume:
            raise ConfigError(
                "dry_run: a resumed search was checked when it started; leave out --resume"
            )

    def rehearse(self) -> Iterator[Mapping[str, str]]:
        from orchestrator.search.estimate import check_disk, estimate_search, local_parallel
        from orchestrator.search.setup import open_models
        from orchestrator.search.validation import check_epochs, check_gpus, rehearse_search
        from orchestrator.storage.paths import SearchFolder, storage_path

        config = open_models(self.config, weights=False)
        setup = rehearse_search(config).setup
        check_epochs(config, (each.recipe for each in setup.problem.named))
        check_gpus(config)
        storage, parallel = storage_path(config.storage), local_parallel(config)
        estimate = estimate_search(setup, storage, parallel=parallel)
        yield estimate.describe(config, verbose=self.verbose)
        warn(estimate.warnings)
        estimate.check()
        check_disk(setup, parallel)
        folder = SearchFolder.free_path(storage, config.name)
        note = (
            f" ({config.name!r} exists already; --resume continues the newest search of that name)"
        )
        yield {"folder": f"{folder}{note if folder.name != config.name else ''}"}

    def run(self) -> Mapping[str, Any]:
        """Run the search, which prints its progress and its results."""
        from orchestrator.pipeline import search

        options = self.options
        self.outcome = search(
            self.config,
            resume=self._words[1] or bool(options.resume),
            sync_from=options.sync_from,
            verbose=self.verbose,
        )
        return self.outcome.to_dict()

    def show(self, record: Mapping[str, Any]) -> None:
        """Print nothing: the search has printed its results."""

    def exit_code(self, record: Mapping[str, Any]) -> int:
        return self.outcome.exit_code


def split_overrides(words: list[str], resume: bool) -> tuple[list[str], str | None]:
    """Return the overrides among the arguments, and the search that `--resume` names.

    That is the one argument that is not an override.

    Raises:
        ConfigError: If there are several such arguments.
    """
    names = (
        [word for word in words if "=" not in word or (Path(word) / "search.yaml").is_file()]
        if resume
        else []
    )
    if len(names) > 1:
        raise ConfigError(f"--resume: got the names {' and '.join(names)}; give one")
    return [word for word in words if word not in names], next(iter(names), None)


def warn(warnings: Iterable[str]) -> None:
    """Print warnings on stderr."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
