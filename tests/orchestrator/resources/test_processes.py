"""Each process of a search under a hard limit: what it is said to take, times 1.15 (`benchmarks.needs.enforced`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models import llama
from benchmarks.needs.enforced import SMALL, SPARE, run
from benchmarks.needs.limited import BROKEN, run_limited
from benchmarks.needs.memory import WIDE, random_checkpoint
from orchestrator.resources.memory import available_bytes
from orchestrator.resources.processes import PROCESS

GIGA = 2**30
NEEDED = 16 * GIGA
"""The size of two workers that train 1.1 billion parameters."""


def filling(gigabytes: float) -> str:
    """Memory for a while, as an expression: a process can only run importable functions, as `eval` is."""
    return f"[(held := b'x' * {round(gigabytes * GIGA)}), __import__('time').sleep(0.3), len(held)][-1]"


@pytest.mark.extended
def test_a_limit_is_kept(tmp_path: Path) -> None:
    """Assumption of the other test: more than the limit is refused, and less is seen."""
    (done,) = run_limited(tmp_path / "within", eval, filling(0.5), limit=1.2 * GIGA)
    assert 0.5 * GIGA < done.peak < 1.2 * GIGA
    with pytest.raises(RuntimeError, match="MemoryError"):
        run_limited(tmp_path / "beyond", eval, filling(2.0), limit=1.2 * GIGA)
    with pytest.raises(RuntimeError, match=BROKEN):  # where files might be mapped, it is looked at what is touched
        run_limited(tmp_path / "looked-at", eval, filling(2.0), limit=1.2 * GIGA, files=4 * GIGA)


@pytest.mark.extended
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("large", [False, True], ids=["0.12B", "1.1B"])
def test_a_search_keeps_to_its_estimate(tmp_path: Path, large: bool) -> None:
    """Calibration, planning, conversion and rung 0, a step with ZeRO 3, gate and export; none holds two models."""
    layers, shape = (19, WIDE) if large else (4, SMALL)
    if large and available_bytes() < NEEDED:
        pytest.skip(f"needs {NEEDED // GIGA} GiB of memory, {available_bytes() / GIGA:.1f} are available")
    numbers = random_checkpoint(llama(layers, shape, tie_word_embeddings=False), tmp_path / "model")
    assert not large or numbers > 1.1e9
    steps = {step.name: step for step in run(tmp_path / "model", tmp_path, large=large)}
    assert list(steps) == ["original model", "planning", "one worker", "training worker", "gate"]
    for step in steps.values():
        assert step.peak < SPARE * step.need.total, step
        assert step.need.parts.get("weights", 0) <= step.model, step
    for name in ("original model", "planning", "gate"):
        assert steps[name].peak - PROCESS < 2 * steps[name].model, steps[name]
    if large:  # memory that is the same for each worker, libraries and logits, exceeds a smaller model
        assert steps["training worker"].peak <= 0.7 * steps["one worker"].peak
