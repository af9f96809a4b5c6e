"""Conversions at several KV ratios in one folder: loss by KV bytes before any training.

The folder has a checkpoint in `kv-RATIO` for each ratio, `curve.json` and `curve.png`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attention.io.files import written_whole
from attention.io.replacing import check_folder, digests, resolved
from attention.io.sources import source_name
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.record import ConversionRecord, CurveRecord
from orchestrator.storage.outputs import check_file, read_result, write_result
from search_spaces.recipes.catalogue import recipe as named_recipe
from search_spaces.recipes.recipe import Recipe

CURVE, PICTURE = "curve.json", "curve.png"
_SHARED = (
    "model",
    "recipe",
    "original_loss",
    "calibration_data",
    "eval_data",
    "eval_documents_left_out",
    "sequence_length",
    "original_perplexity",
    "eval_tokens",
    "calibration_tokens",
    "seed",
    "dtype",
    "kv_bytes_per_token_original",
)
"""Keys that the points of one call have in common."""
_CHECKED = ("model", "recipe", "original_loss", "original_perplexity")
"""Those of them that `check_curve` or SAME_LOSS has compared."""
SAME_LOSS = 1e-4  # nats per token, between two measurements of one model


def is_curve(folder: str | Path) -> bool:
    """Whether a folder is one of several ratios."""
    return isinstance(read_result(Path(folder) / CURVE).get("points"), list)


def ratio_folder(out: str | Path, ratio: float) -> Path:
    """Return the folder of the checkpoint of a ratio."""
    return Path(out) / f"kv-{ratio:g}"


def check_curve(
    out: str | Path,
    model: str | Path,
    recipe: str | Recipe,
    kv_ratios: Sequence[float],
    overwrite: bool,
) -> None:
    """Check, before any work, that checkpoints of these ratios can be put into `out`.

    Raises:
        ConfigError: Unless `out` is free, empty, or a folder of ratios of the same model and
            recipe.
        OutputError: For a ratio that is there, without `overwrite`.
    """
    path = resolved(out)
    if os.path.lexists(path) and (path.is_symlink() or not path.is_dir()):
        raise ConfigError(f"out: {str(path)!r} is a link or a file; name a folder")
    for entry in sorted(path.iterdir()) if path.is_dir() and not is_curve(path) else ():
        if not (entry.name.startswith("kv-") and digests(entry)):
            raise ConfigError(
                f"out: {str(path)!r} holds {entry.name!r} and is no folder of several ratios; "
                "give another folder"
            )
    for ratio in kv_ratios:
        check_folder(ratio_folder(path, ratio), overwrite=overwrite, reads=[model])
    check_file(path / CURVE, "json", "out")
    check_file(path / PICTURE, "picture", "out")
    earlier = read_result(path / CURVE)
    if not earlier:
        return
    chosen = named_recipe(recipe) if isinstance(recipe, str) else recipe
    other = ""
    if not _is_same_model(earlier["model"], model):
        other = "model"
    elif Recipe.from_dict(earlier["recipe"]).digest != chosen.digest:
        other = "recipe"
    if other:
        raise ConfigError(
            f"out: {str(path)!r} holds ratios of another {other}; give another folder"
        )


def _is_same_model(one: str | Path, other: str | Path) -> bool:
    one = source_name(one)
    other = source_name(other)
    folders = (Path(one), Path(other))
    return one == other or (
        all(folder.exists() for folder in folders) and folders[0].samefile(folders[1])
    )


def curve_record(records: Sequence[ConversionRecord]) -> CurveRecord:
    """Return what the conversions of one call have in common, and `points`, the rest of each."""
    first: Mapping[str, Any] = records[0]
    record: Any = {name: first[name] for name in _SHARED}
    return record | {"points": [_point(each) for each in records]}


def _point(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in _SHARED}


def add_to_curve(out: str | Path, record: ConversionRecord) -> None:
    """Write a point to `curve.json`, with those of earlier calls whose checkpoints exist.

    Earlier points with other measurements (other texts, another seed or dtype) cannot be on one
    curve: they are left out, with a note on stderr; their checkpoints stay.
    """
    fields: Mapping[str, Any] = record
    file = Path(out) / CURVE
    earlier = read_result(file)
    points = [
        point
        for point in earlier.get("points", ())
        if point["kv_ratio_asked"] != fields["kv_ratio_asked"]
        and ratio_folder(out, point["kv_ratio_asked"]).is_dir()
    ]
    compared = [name for name in _SHARED if name not in _CHECKED]
    if points and (
        any(earlier.get(name, fields[name]) != fields[name] for name in compared)
        or abs(earlier["original_loss"] - fields["original_loss"]) > SAME_LOSS
    ):
        print(
            f"note: {file} leaves out earlier points, which were measured otherwise",
            file=sys.stderr,
        )
        points = []
    joined = sorted([*points, _point(fields)], key=lambda point: -point["kv_ratio"])
    write_result(file, {name: fields[name] for name in _SHARED} | {"points": joined}, "out")


def draw_curve(out: str | Path) -> None:
    """Draw `curve.png` from `curve.json`."""
    from orchestrator.reporting.figures.drawing import save_png
    from orchestrator.reporting.figures.search import curve_figure

    path = check_file(Path(out) / PICTURE, "picture", "out")
    with written_whole(path) as fresh:
        save_png(curve_figure(read_result(Path(out) / CURVE)), fresh)
