"""`headfold promote`: the full training, gate and registry for chosen trials of a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.config.options import PromoteOptions
from orchestrator.storage.paths import SearchFolder
from orchestrator.tasks.packages import SEARCH_PACKAGES, check_packages
from orchestrator.tasks.task import Task

if TYPE_CHECKING:
    from orchestrator.promotion.state import PromoteOutcome


class Promote(Task[PromoteOptions, Mapping[str, Any]]):
    """A promotion from the folder of a search.

    Attributes:
        outcome: The result, once it has run.
    """

    outcome: PromoteOutcome

    def check(self) -> None:
        SearchFolder.existing(self.options.search)
        check_packages("promote", *SEARCH_PACKAGES)

    def rehearse(self) -> Iterable[Mapping[str, str]]:
        from orchestrator.promotion.promote import rehearse_promotion

        options = self.options
        record = rehearse_promotion(
            options.search,
            trials=options.trial or (),
            top=options.top,
            overrides=options.overrides or (),
        )
        return [record]

    def run(self) -> Mapping[str, Any]:
        """Train, check and register, and print the results."""
        from orchestrator.promotion.promote import promote_search

        options = self.options
        self.outcome = promote_search(
            options.search,
            trials=options.trial or (),
            top=options.top,
            sync_from=options.sync_from,
            overrides=options.overrides or (),
        )
        return self.outcome.to_dict()

    def show(self, record: Mapping[str, Any]) -> None:
        """Print nothing: the promotion has printed its results."""

    def exit_code(self, record: Mapping[str, Any]) -> int:
        return self.outcome.exit_code
