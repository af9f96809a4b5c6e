"""Every benchmark runs in its smallest size and gives well-formed rows. No time is asserted here."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.grouping import brute_force
from benchmarks.report import NEWEST, Row, Scale, benchmarks, entry, keep, medians, table
from search_spaces.grouping.subsets import exact_partition

WANTED = {"walk", "grouping", "calibration", "conversion", "decode-layer", "decode-model", "relaxations", "composition"}


# Clusters, processes, calibrations, models that are trained first
LONG = {"worker-pool", "estimates", "memory", "memory-limits", "moments", "real-width", "texts"}
LONG |= {
    "families",
    "fit-decay",
    "objectives",
    "cache_formats",
    "combinations",
    "planning",
    "pruning",
    "rivals",
    "start",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] * (name in LONG)) for name in sorted(benchmarks())]
)
def test_it_runs_and_its_rows_are_well_formed(name: str) -> None:
    rows = list(benchmarks()[name].run(Scale(quick=True)))
    assert rows and len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert math.isfinite(row.ours) and row.ours > 0
        assert row.ratio is None or math.isfinite(row.ratio)
        assert "|" not in row.name + row.note + row.unit
    assert len(table({name: rows}).splitlines()) == 2 + len(rows)


def test_all_that_is_promised_is_there() -> None:
    assert set(benchmarks()) >= WANTED


def test_a_row_that_is_no_measurement_is_refused() -> None:
    assert Row("x", 2.0, 8.0, "ms").ratio == 4
    for ours, rival in ((0.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (-1.0, None)):
        with pytest.raises(ValueError, match="positive finite ms"):
            Row("x", ours, rival, "ms")


def test_works_take_turns_and_the_first_turn_is_not_counted() -> None:
    calls: list[str] = []
    chosen = medians({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, repeat={"b": 2})
    assert "".join(calls) == "abb" * 3
    assert set(chosen) == {"a", "b"}


def test_the_rival_of_exact_grouping_tries_all() -> None:
    """On a matrix in which the cheapest partitions are known: two tight clusters far from each other."""
    pairs = np.full((4, 4), 10.0)
    pairs[:2, :2] = pairs[2:, 2:] = 1.0
    assert brute_force(pairs) == {1: 42.0, 2: 2.0, 3: 1.0, 4: 0.0}
    assert {g: -float(p.score or 0) for g, p in exact_partition(pairs, 4).items()} == brute_force(pairs)


def test_the_newest_entry_comes_first(tmp_path: Path) -> None:
    log = tmp_path / "LOG.md"
    log.write_text(f"# Log\n\n{NEWEST}\n\n## older\n")
    keep(entry({"walk": [Row("x", 2.0, 8.0, "ms", "why")]}, "make it so", "cpu", 0.5, 3.0), log)
    text = log.read_text()
    assert text.index(NEWEST) < text.index("make it so") < text.index("## older")
    assert "| walk: x | 2 | 8 | ms | **4.00** | why |" in text
    assert re.search(r"\d+ CPU cores, \d+ GB; Python 3", text) and "Busy" not in text
    assert "Busy machine" in entry({}, "x", "cpu", 9.0, 1.0)
    log.write_text("# Log\n")
    with pytest.raises(ValueError, match="has no line"):
        keep("x", log)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a CUDA device")
def test_without_a_cuda_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err


def test_an_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["dinner"])
    output = capsys.readouterr().err
    assert "got dinner" in output and all(name in output for name in WANTED)
