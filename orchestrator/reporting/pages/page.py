"""A self-contained HTML page, through the template `page.html`: parts of headed sections. No script, no network.

It is made for any width from 360 px on, for light and dark, for keyboards and for screen readers: what is wider than
the page scrolls in a box of its own, and every picture says in words what it shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from orchestrator.reporting.figures import drawing
from orchestrator.reporting.tables import LEFT, PROSE, Table
from orchestrator.storage.outputs import GENERATOR

LIMIT = 3_000_000  # bytes of a page


@dataclass(frozen=True)
class Picture:
    """A figure, what it shows in words for those who do not see it, a caption for all, and the same for a narrow page
    (without one, the figure scrolls there)."""

    figure: Figure
    alt: str
    caption: str = ""
    narrow: Figure | None = None


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, in this order; `folded`: a summary that the rest is folded under.

    `stats`: numbers that stand out, each with its name and a remark. `again`: how single trials are made again:
    mappings with summary, facts, and command or why_not. `commands`: pairs of a name and lines to be copied; `samples`:
    texts side by side, as `evaluation.generations` records them. `source`: text that is shown as it is. `wide`: takes
    the whole width of a wide page; `tall`: two rows of its sections.
    """

    title: str
    text: str = ""
    stats: Sequence[tuple[str, str, str]] = ()
    picture: Picture | None = None
    tables: Sequence[Table] = ()
    commands: Sequence[tuple[str, str]] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    again: Sequence[dict[str, Any]] = ()
    source: str = ""
    folded: str = ""
    wide: bool = False
    tall: bool = False

    @property
    def has_content(self) -> bool:
        parts = (self.stats, self.picture, self.text, self.tables, self.commands, self.samples, self.again, self.source)
        return any(parts)


@dataclass(frozen=True)
class Part:
    """A part of a page: its heading, a sentence, and its sections. Sections with nothing in them are left out, and so
    is a part without any."""

    title: str
    sections: Sequence[Section]
    text: str = ""


def render_page(title: str, heading: str, lead: str, parts: Sequence[Part]) -> str:
    """The HTML of a page. Raises RuntimeError for one above LIMIT."""
    filled = [Part(p.title, kept, p.text) for p in parts if (kept := [s for s in p.sections if s.has_content])]
    content = _environment.get_template("page.html").render(title=title, heading=heading, lead=lead, parts=filled)
    if (size := len(content.encode())) > LIMIT:
        raise RuntimeError(f"the page has {size} bytes, more than {LIMIT}; this is a bug")
    return content + "\n"


def _svg(figure: Figure, label: str) -> Markup:
    return Markup(drawing.svg(figure, str(escape(label))))


def _slug(title: str) -> str:
    """A title as the name of a place on the page."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


_environment = jinja2.Environment(
    loader=jinja2.PackageLoader("orchestrator.reporting.pages", "."),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters |= {"svg": _svg, "slug": _slug}
_environment.globals |= {
    "generator": Markup(GENERATOR),
    "prose": PROSE,
    "left": LEFT,
    "theme": drawing.THEME,
    "stylesheet": Markup((Path(__file__).parent / "page.css").read_text(encoding="utf-8")),
}
