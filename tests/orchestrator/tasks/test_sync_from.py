"""`--sync-from` of `search` and of `promote` reaches what compares both copies of a storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator import pipeline
from orchestrator.config.options import PromoteOptions, SearchOptions
from orchestrator.promotion import promote
from orchestrator.tasks.promote import Promote
from orchestrator.tasks.search import Search


class Reached(Exception):
    """Raised where the option has arrived."""


@pytest.mark.parametrize("side", ["address", "folder"])
def test_the_side_is_passed_on(side: Any, demo_dir: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: Any, sync_from: Any, **more: Any) -> None:
        raise Reached(sync_from)

    monkeypatch.setattr(pipeline, "search", reached)
    monkeypatch.setattr(promote, "promote_search", reached)
    config = Path(__file__).resolve().parents[3] / "configs" / "demo.yaml"
    searching = Search(SearchOptions(config=config, overrides=[f"model.path={demo_dir}"], sync_from=side))
    for task in (searching, Promote(PromoteOptions(search=Path("runs/mine"), sync_from=side))):
        with pytest.raises(Reached, match=side):
            task.run()
