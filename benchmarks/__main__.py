"""Run benchmarks: `python -m benchmarks [NAME ...] [--quick | --wide] [--device cuda] [--log] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

import torch

from benchmarks.report import Row, Scale, as_json, benchmarks, entry, keep, table


def parse(words: list[str] | None = None) -> argparse.Namespace:
    known = benchmarks()
    listed = "\n".join(f"  {b.name:14} {b.title}" for b in known.values())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=listed, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which (default: all that this device is for)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="smallest sizes, to see that everything runs")
    size.add_argument("--wide", action="store_true", help="layers of large models (planning: 32 heads of 128; long)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="threads of one operation (CPU)")
    parser.add_argument("--log", action="store_true", help="put the results on top of benchmarks/LOG.md")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"expected benchmarks among {', '.join(known)}, got {unknown[0]}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.exit(
            2, "benchmarks: --device cuda needs a CUDA device, none is to be seen here; on the CPU: make bench\n"
        )
    return arguments


def main(words: list[str] | None = None) -> None:
    arguments = parse(words)
    torch.set_num_threads(arguments.threads)
    scale, available = Scale(arguments.quick, arguments.device, arguments.wide), benchmarks()
    # One whole run at a time writes progress to stderr and the table to stdout.
    load, started = os.getloadavg()[0], time.perf_counter()
    results: dict[str, list[Row]] = {}
    for name in arguments.names or [
        b.name for b in available.values() if arguments.quick or arguments.device in b.devices
    ]:
        print(f"benchmarks: {name}: {available[name].title}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        results[name] = []
        for row in available[name].run(scale):
            results[name].append(row)
            print(table({name: [row]}).splitlines()[-1], file=sys.stderr, flush=True)
        print(f"benchmarks: {name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(results), indent=1) + "\n", encoding="utf-8")
    if arguments.log:
        command = shlex.join(["python", "-m", "benchmarks", *(sys.argv[1:] if words is None else words)])
        keep(entry(results, command, arguments.device, load, time.perf_counter() - started))


if __name__ == "__main__":
    main()
