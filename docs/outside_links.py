"""Hook of mkdocs: what a page links to outside of docs/ is no page of the site, and is named there without a link."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    depth = page.file.src_uri.count("/") + 1  # steps up that lead out of docs/
    outside = rf"\[([^\]]+)\]\((?:\.\./){{{depth}}}(?!\.\.)[^)]+\)"
    return re.sub(outside, r"\1", markdown)
