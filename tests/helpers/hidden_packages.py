"""Packages that a process does not find, as if they were not installed."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any


class _Hiding:
    """A finder of modules and distributions without some of those that `inner` finds."""

    def __init__(self, inner: Any, packages: Collection[str]) -> None:
        self._inner = inner
        self._packages = packages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self._packages else self._inner.find_spec(name, path, target)

    def find_distributions(self, context: Any) -> Any:
        find = getattr(self._inner, "find_distributions", None)
        return iter(()) if find is None or context.name in self._packages else find(context)


def hide(packages: Collection[str]) -> None:
    """Hide packages from this process, in which none of them may be imported yet."""
    assert not sys.modules.keys() & set(packages)
    sys.meta_path[:] = [_Hiding(finder, packages) for finder in sys.meta_path]
