"""No fan-out needs more GPUs at once than there are: each runs to its end on exactly as many as one of its processes
has, and on more (`exact_gpus.py`). The GPUs are numbers that Ray counts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from json_output import last_json

SCRIPT = Path(__file__).with_name("exact_gpus.py")
REPOSITORY = SCRIPT.parents[3]


def run(folder: Path, gpus: int, *fan_outs: str, seconds: float = 400) -> tuple[dict[str, Any], str]:
    """The results of the fan-outs, and their output. One that waits for ever is a failure."""
    command = [sys.executable, str(SCRIPT), str(folder), str(gpus), *fan_outs]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    environment.pop("RAY_ADDRESS", None)
    ended = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=seconds
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return last_json(ended.stdout), ended.stdout


@pytest.mark.extended
def test_a_large_calibration_needs_no_gpu_besides_those_of_its_workers(tmp_path: Path) -> None:
    """It used to be shared by as many tasks as there are GPUs, one of which its own parent had reserved."""
    report, printed = run(tmp_path, 2, "calibration")
    assert "up to 2 workers share 32 sequences" in printed
    assert len(report["calibration"]) == 4 == len(set(report["calibration"]))


@pytest.mark.extended
def test_a_calibration_has_the_same_bits_on_any_number_of_gpus(tmp_path: Path) -> None:
    digests = [run(tmp_path / f"{gpus}", gpus, "calibration")[0]["calibration"] for gpus in (2, 3, 9)]
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.extended
@pytest.mark.parametrize("gpus", [1, 2])
def test_every_fan_out_before_the_trials_ends(gpus: int, tmp_path: Path) -> None:
    report, _ = run(tmp_path, gpus, "calibration", "increases", "search_phases", "similarities", seconds=900)
    assert len(report["calibration"]) == 4
    assert report["increases"] == 4
    assert (report["search_phases"], report["similarities"]) == (3, 8)


@pytest.mark.extended
def test_what_can_never_continue_ends_and_says_what_waits_for_what(tmp_path: Path) -> None:
    report, _ = run(tmp_path, 1, "stalled")
    reason = report["stalled"]
    assert re.match(r"no progress for \d+ s, nothing else uses", reason), reason
    assert "nothing else uses the cluster, and no node can be added: 1 x 1 GPU + 0.5 CPU requested" in reason
    assert "requested by 1 x 'another one' (1 GPU + 0.5 CPU); 0 of 1 CPU and 1 of 1 GPU in use by" in reason
    assert reason.endswith("in use by 1 x 'original model' (1 GPU + 0.5 CPU)")


@pytest.mark.extended
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("gpus", [2, 4])
def test_a_search_ends_on_the_gpus_of_one_trial(gpus: int, tmp_path: Path) -> None:
    """Calibration, planning, trainings, promotion, gate and evaluation, on the GPUs of one trial and of two."""
    report, printed = run(tmp_path, gpus, "search", seconds=1400)
    assert f"up to {gpus} workers share 32 sequences" in printed
    assert report["search"]["trials"] == ["done"] * 4
    assert report["search"]["promoted"] == ["promoted"]
    assert report["search"]["calibrated"]
