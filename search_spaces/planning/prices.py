"""Prices of groups, stored for the next plan: of another seed, KV ratio, trial or process.

Exact grouping needs the price of every group of some sizes at a site. Computing them takes most of
the time of a plan, and they are the same for every plan of one objective on one calibration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import (
    load_file,  # pyright: ignore[reportUnknownVariableType] - its PathLike has no parameter
    save,
)

from attention.io.file_lock import file_lock
from attention.io.files import write_whole
from search_spaces.site import Site


class StoredPrices:
    """The prices of one objective at one site by size of group, in a file that processes add to.

    All prices of a size are in the order of `itertools.combinations`.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> dict[int, np.ndarray]:
        """Return the float64 prices by size.

        None if the file is missing or damaged, since they can be worked out again.
        """
        try:
            stored = {int(size): prices for size, prices in load_file(self.file).items()}
            return {
                s: p
                for s, p in stored.items()
                if p.dtype == np.float64 and p.ndim == 1 and np.isfinite(p).all()
            }
        except (OSError, ValueError, SafetensorError):
            return {}

    def add(self, prices: Mapping[int, np.ndarray]) -> None:
        """Raise OSError if the folder cannot be written."""
        with file_lock(self.file.parent / ".lock"):
            every = self.read() | dict(prices)
            write_whole(
                self.file,
                save({str(size): np.ascontiguousarray(every[size]) for size in sorted(every)}),
            )


def prices_of_site(
    folder: str | Path, objective: str, knobs: Mapping[str, Any], site: Site, digest: str
) -> StoredPrices:
    """Return the file of an objective's prices at a site.

    `digest` is that of the calibration, and so of the model.
    """
    record = {
        "objective": [objective, dict(knobs)],
        "site": [site.layer, site.by, site.units, *([site.width] if site.width > 1 else [])],
        "calibration": digest,
        "similarity": digest_of(site.similarity),
        "fusion distance": digest_of(site.fusion_distance),
    }
    name = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:24]
    return StoredPrices(Path(folder) / f"prices-{name}.safetensors")


def digest_of(matrix: np.ndarray | None) -> str | None:
    """Return a digest of the numbers of a matrix; None without one."""
    return (
        None
        if matrix is None
        else hashlib.sha256(np.ascontiguousarray(matrix).tobytes()).hexdigest()
    )
