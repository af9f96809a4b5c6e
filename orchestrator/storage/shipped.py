"""Files that come along with Headfold beside its packages: configurations, the demo checkpoint, the schema for editors.

In a checkout they lie where the repository has them; a wheel puts them into `share/headfold` of its environment
(`tool.setuptools.data-files` in pyproject.toml).
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
INSTALLED = "share/headfold/"


def shipped(name: str) -> Path:
    """The absolute path of a file that comes along, by its path in the repository, e.g. `configs/demo.yaml`.

    Raises FileNotFoundError if this installation lacks it.
    """
    if (CHECKOUT / name).is_file():
        return CHECKOUT / name
    try:
        files = metadata.files("headfold") or ()
    except metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.as_posix().endswith(INSTALLED + name):
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError(f"this installation of Headfold lacks {name}; install it anew from its wheel")
