"""Files that are installed with Headfold's packages: configs, the demo checkpoint, the schema.

In a checkout they are at their paths in the repository; a wheel puts them into `share/headfold` of
its environment (`tool.setuptools.data-files` in pyproject.toml).
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
_INSTALLED = "share/headfold/"


def shipped(name: str) -> Path:
    """Return the absolute path of a file.

    Args:
        name: Its path in the repository, e.g. `configs/demo.yaml`.

    Raises:
        FileNotFoundError: If this installation lacks it.
    """
    if (_CHECKOUT / name).is_file():
        return _CHECKOUT / name
    try:
        files = metadata.files("headfold") or ()
    except metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.as_posix().endswith(_INSTALLED + name):
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError(
        f"this installation of Headfold lacks {name}; reinstall it from its wheel"
    )
