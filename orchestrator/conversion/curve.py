"""`headfold convert` with several ratios: loss against KV bytes before any training, from one calibration."""

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
from orchestrator.conversion.memory_store import Source
from orchestrator.conversion.record import ConversionRecord, CurveRecord
from orchestrator.conversion.request import ConversionRequest
from orchestrator.storage.outputs import Interrupted, check_file, read_result, write_result
from search_spaces.recipes.catalogue import recipe as named_recipe
from search_spaces.recipes.recipe import Recipe

BASE_BYTES = "kv_bytes_per_token_original"
CURVE, PICTURE = "curve.json", "curve.png"
TEXTS = ("calibration_data", "eval_data", "eval_documents_left_out", "sequence_length", "original_perplexity")
SHARED = (
    "model",
    "recipe",
    "original_loss",
    *TEXTS,
    "eval_tokens",
    "calibration_tokens",
    "seed",
    "dtype",
    BASE_BYTES,
)
OF_THE_CALL = (
    "model",
    "recipe",
    "original_loss",
    "original_perplexity",
)  # the same by `check_curve`, or up to SAME_LOSS
SAME_LOSS = 1e-4  # nats per token, between two measurements of one model


def convert_curve(request: ConversionRequest, out: Path | None = None, *, overwrite: bool = False) -> CurveRecord:
    """Convert at each ratio of a request, which `check_curve` has passed.

    A ratio stands for the largest one at or below it that the recipe can meet, each once. With `out`: a
    checkpoint in `kv-RATIO`, `curve.json` and `curve.png` there; the ratios that lie there already stay, and join the
    curve. `overwrite`: those that are named again are replaced. Returns what all points of this call share, and
    `points`, by falling KV ratio.
    """
    source = Source.load(request)
    points: list[ConversionRecord] = []
    try:
        for kv_ratio in request.distinct().values():
            folder = None if out is None else ratio_folder(out, kv_ratio)
            points.append(source.at(kv_ratio, folder, overwrite=overwrite))
            if out is not None:
                _add(out, points[-1])
    except KeyboardInterrupt:
        done = ", ".join(f"kv-{point['kv_ratio_asked']:g}" for point in points if out is not None)
        left = f"{done} in {out} are finished, the others not begun" if done else "nothing was written"
        raise Interrupted(left) from None
    if out is not None:
        _draw(out)
    record: Any = {name: points[0][name] for name in SHARED} | {"points": [_facts(point) for point in points]}
    return record


def join_curve(out: Path, record: ConversionRecord) -> None:
    """Add a conversion that was written to its `ratio_folder` to the curve of a folder."""
    _add(out, record)
    _draw(out)


def is_curve(folder: str | Path) -> bool:
    """Whether `convert_curve` has made a folder."""
    return isinstance(read_result(Path(folder) / CURVE).get("points"), list)


def check_curve(
    out: str | Path,
    model: str | Path,
    recipe: str | Recipe,
    kv_ratios: Sequence[float],
    overwrite: bool,
) -> None:
    """Raise ConfigError or OutputError, before any work, unless checkpoints of these ratios can be put into `out`.

    It must be free, empty, or a folder of ratios of the same model and recipe.
    """
    place = resolved(out)
    if os.path.lexists(place) and (place.is_symlink() or not place.is_dir()):
        raise ConfigError(f"out: {str(place)!r} is a link or a file; name a folder")
    for entry in sorted(place.iterdir()) if place.is_dir() and not is_curve(place) else ():
        if not (entry.name.startswith("kv-") and digests(entry)):
            raise ConfigError(
                f"out: {str(place)!r} holds {entry.name!r} and is no folder of several ratios; give another folder"
            )
    for ratio in kv_ratios:
        check_folder(ratio_folder(place, ratio), overwrite=overwrite, reads=[model])
    check_file(place / CURVE, "json", "out")
    check_file(place / PICTURE, "picture", "out")
    earlier = read_result(place / CURVE)
    chosen = named_recipe(recipe) if isinstance(recipe, str) else recipe
    other = earlier and (
        ("model" if not _same(earlier["model"], model) else "")
        or ("recipe" if Recipe.from_dict(earlier["recipe"]).digest != chosen.digest else "")
    )
    if other:
        raise ConfigError(f"out: {str(place)!r} holds ratios of another {other}; give another folder")


def _same(one: str | Path, other: str | Path) -> bool:
    """Whether two names are those of one model."""
    one, other = source_name(one), source_name(other)
    folders = Path(one), Path(other)
    return one == other or (all(map(Path.exists, folders)) and folders[0].samefile(folders[1]))


def ratio_folder(out: str | Path, ratio: float) -> Path:
    """Where the checkpoint of a ratio lies in a folder of several."""
    return Path(out) / f"kv-{ratio:g}"


def _facts(point: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in point.items() if key not in SHARED}


def _add(out: str | Path, point: Mapping[str, Any]) -> None:
    """Write a point to `curve.json`, beside those of earlier calls whose checkpoints are still there.

    Earlier points that were measured otherwise (other texts, another seed or dtype) cannot be on one curve: they are
    left out, and told of; their checkpoints stay.
    """
    file = Path(out) / CURVE
    earlier, asked = read_result(file), point["kv_ratio_asked"]
    others = [p for p in earlier.get("points", ()) if p["kv_ratio_asked"] != asked]
    points = [p for p in others if ratio_folder(out, p["kv_ratio_asked"]).is_dir()]
    same = [name for name in SHARED if name not in OF_THE_CALL]
    other = points and [name for name in same if earlier.get(name, point[name]) != point[name]]
    if points and (other or abs(earlier["original_loss"] - point["original_loss"]) > SAME_LOSS):
        print(f"note: {file} leaves out earlier points, which were measured otherwise", file=sys.stderr)
        points = []
    joined = sorted([*points, _facts(point)], key=lambda p: -p["kv_ratio"])
    write_result(file, {name: point[name] for name in SHARED} | {"points": joined}, "out")


def _draw(out: str | Path) -> None:
    from orchestrator.reporting.figures.drawing import save_png
    from orchestrator.reporting.figures.search import curve_figure

    place = check_file(Path(out) / PICTURE, "picture", "out")
    with written_whole(place) as fresh:
        save_png(curve_figure(read_result(Path(out) / CURVE)), fresh)
