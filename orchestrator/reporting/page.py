"""A self-contained HTML page, through the template `page.html`: headed sections. No script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from matplotlib.figure import Figure

from orchestrator.reporting.figures import drawing
from orchestrator.reporting.tables import PROSE, Table
from orchestrator.storage.outputs import GENERATOR

LIMIT = 3_000_000  # bytes of a page

_environment = jinja2.Environment(
    loader=jinja2.PackageLoader("orchestrator.reporting", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
_environment.filters["svg"] = drawing.svg
_environment.globals |= {"generator": GENERATOR, "prose": PROSE}


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, in this order; `folded`: a summary that the rest is folded under.

    `again`: how single trials are made again: mappings with summary, facts, and command or why_not. `source`: text that
    is shown as it is.
    """

    title: str
    picture: Figure | None = None
    caption: str = ""
    text: str = ""
    table: Table | None = None
    again: Sequence[dict[str, Any]] = ()
    source: str = ""
    folded: str = ""


def render_page(title: str, heading: str, lead: str, sections: Sequence[Section]) -> str:
    """The HTML of a page; sections with nothing in them are left out. Raises RuntimeError for one above LIMIT."""
    filled = [s for s in sections if s.picture or s.text or s.table or s.again or s.source]
    content = _environment.get_template("page.html").render(title=title, heading=heading, lead=lead, sections=filled)
    if (size := len(content.encode())) > LIMIT:
        raise RuntimeError(f"the page has {size} bytes, more than {LIMIT}; this is a bug")
    return content + "\n"
