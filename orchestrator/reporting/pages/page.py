"""A self-contained HTML page, through the template `page.html`. No network.

It consists of parts with headed sections, and supports any width from 360 px, light and dark
colours, keyboards and screen readers: wide content scrolls in its own box, and every picture has a
text description. The script of the page (`page.js`) sorts and filters tables, copies commands and
shows the values of points; without it, all content is still shown.
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
    """Command that runs a trial again."""

    summary: str
    facts: dict[str, str]
    command: str | None
    why_not: str
    """Shown if there is no command."""


@dataclass(frozen=True)
class Picture:
    """A figure with its texts.

    Attributes:
        figure: The figure.
        alt: Description for screen readers.
        caption: Caption below it.
        narrow: The figure for a narrow page; without one, the figure scrolls there.
    """

    figure: Figure
    alt: str
    caption: str = ""
    narrow: Figure | None = None


@dataclass(frozen=True)
class PageSection:
    """A heading and the content below it, in this order.

    Attributes:
        title: The heading.
        text: A paragraph.
        stats: Numbers that stand out.
        picture: A picture.
        tables: Tables.
        commands: Names, and lines to be copied.
        samples: Texts side by side, as recorded by `evaluation.generations`.
        again: How to run single trials again.
        source: Text that is shown unchanged.
        folded: Summary of the folded content.
        wide: Whether it uses the whole width of a wide page.
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

    @property
    def has_content(self) -> bool:
        texts = (self.text, self.source)
        blocks = (self.stats, self.picture, self.tables, self.commands, self.samples, self.again)
        return any(texts) or any(blocks)


@dataclass(frozen=True)
class PagePart:
    """A part of a page: its heading and its sections.

    Empty sections are left out, and so is a part without sections.

    Attributes:
        folded: Whether only its heading is shown until it is opened.
    """

    title: str
    sections: Sequence[PageSection]
    folded: bool = False


def render_page(title: str, heading: str, lead: str, parts: Sequence[PagePart]) -> str:
    """Return the HTML of a page.

    Raises:
        RuntimeError: If it is too large.
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
