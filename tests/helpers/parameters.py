"""Cases of a test that only `make test-all` has."""

from __future__ import annotations

from typing import Any

import pytest


def extended(*values: Any, id: str | None = None) -> Any:
    """A case of `parametrize` that runs only in `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.extended, id=id)
