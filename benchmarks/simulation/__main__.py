"""`python -m benchmarks.simulation [scale|halving] ...`: prints the tables of docs/scale.md."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation")
    parser.add_argument("what", choices=("scale", "halving"))
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--scheduler", default="front")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--no-mlflow", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "halving":
        from benchmarks.simulation.comparing import report

        print(report(arguments.seeds))
        return
    from benchmarks.simulation.scale import simulate, table

    with tempfile.TemporaryDirectory(prefix="headfold-simulation-") as folder:
        print(
            table(
                simulate(
                    Path(folder),
                    arguments.trials,
                    arguments.workers,
                    arguments.scheduler,
                    mlflow=not arguments.no_mlflow,
                )
            )
        )


if __name__ == "__main__":
    main()
