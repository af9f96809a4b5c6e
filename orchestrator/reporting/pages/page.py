"""A self-contained HTML page, through the template `page.html`. No network.

It has parts of headed sections, for any width from 360 px on, for light and dark, for keyboards and
for screen readers: what is wider than the page scrolls in its own box, and every picture has a
description in words. The script of the page (`page.js`) sorts and filters tables, copies commands
and shows the values of points; without it all content is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import jinja2
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from orchestrator.reporting.figures import drawing
from orchestrator.reporting.tables import LEFT, PROSE, WRAPPED, Table
from orchestrator.storage.outputs import GENERATOR

_MAX_BYTES = 3_000_000  # of a page


class Stat(NamedTuple):
    """A number that stands out."""

    name: str
    value: str
    remark: str


class Repetition(TypedDict):
    """How a trial is run again."""

    summary: str
    facts: dict[str, str]
    command: str | None
    why_not: str
    """Shown where there is no command."""


@dataclass(frozen=True)
class Picture:
    """A figure with its words.

    Attributes:
        figure: The figure.
        alt: What it shows, for those who do not see it.
        caption: Below it, for all.
        narrow: The same for a narrow page; without one, the figure scrolls there.
    """

    figure: Figure
    alt: str
    caption: str = ""
    narrow: Figure | None = None


@dataclass(frozen=True)
class PageSection:
    """A heading and the content under it, in this order.

    Attributes:
        title: The heading.
        text: A paragraph.
        stats: Numbers that stand out.
        picture: A picture.
        tables: Tables.
        commands: Names, and lines to be copied.
        samples: Texts side by side, as `evaluation.generations` records them.
        again: How single trials are run again.
        source: Text that is shown as it is.
        folded: A summary that the rest is folded under.
        wide: Whether it takes the whole width of a wide page.
        tall: Whether it takes two rows of its sections.
    """

    title: str
    text: str = ""
    stats: Sequence[Stat] = ()
    picture: Picture | None = None
    tables: Sequence[Table] = ()
    commands: Sequence[tuple[str, str]] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    again: Sequence[Repetition] = ()
    source: str = ""
    folded: str = ""
    wide: bool = False
    tall: bool = False

    @property
    def has_content(self) -> bool:
        texts = (self.text, self.source)
        blocks = (self.stats, self.picture, self.tables, self.commands, self.samples, self.again)
        return any(texts) or any(blocks)


@dataclass(frozen=True)
class PagePart:
    """A part of a page: its heading, its sections, and a sentence above them.

    Sections with nothing in them are left out, and so is a part without any.

    Attributes:
        folded: Whether only its heading is shown until it is opened.
    """

    title: str
    sections: Sequence[PageSection]
    text: str = ""
    folded: bool = False


def render_page(title: str, heading: str, lead: str, parts: Sequence[PagePart]) -> str:
    """Return the HTML of a page.

    Raises:
        RuntimeError: For one that is too large.
    """
    shown = []
    for part in parts:
        if sections := [section for section in part.sections if section.has_content]:
            shown.append(replace(part, sections=sections))
    template = _environment.get_template("page.html")
    content = template.render(title=title, heading=heading, lead=lead, parts=shown)
    if (size := len(content.encode())) > _MAX_BYTES:
        raise RuntimeError(f"the page has {size} bytes, more than {_MAX_BYTES}; this is a bug")
    return content + "\n"


def _svg(figure: Figure, label: str) -> Markup:
    return Markup(drawing.svg(figure, str(escape(label))))


def _slug(title: str) -> str:
    """Return a title as an anchor of the page."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _asset(name: str) -> Markup:
    return Markup((Path(__file__).parent / name).read_text(encoding="utf-8"))


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
    "wrapped": WRAPPED,
    "left": LEFT,
    "theme": drawing.THEME,
    "stylesheet": _asset("page.css"),
    "script": _asset("page.js"),
}
