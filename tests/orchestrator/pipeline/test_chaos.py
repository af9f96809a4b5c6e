"""One undisturbed real search, by its records; and under any kills, a search ends with the same records.

The undisturbed search runs as a Ray job, by the real command line, against an MLflow server whose address has a token,
with a learning rate at which any optimiser diverges among its trials. `make test-all` kills the driver in a part of the
same search on the same cluster, and nodes, workers and the rest on separate clusters, `make chaos` at least twenty
processes in a larger search (HEADFOLD_CHAOS_KILLS, HEADFOLD_CHAOS_SEED).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from buckets import bucket
from chaos import AT_AN_ADDRESS, KINDS, MORE_KINDS, Arena, Killer, arena, schedule
from ray.job_submission import JobStatus, JobSubmissionClient
from search_process import LITTLE

from orchestrator.storage.journal import END, REPORT, TRIAL, load_trials, read_events, read_history
from orchestrator.storage.json_files import read_json
from orchestrator.storage.records import COPY, DONE, FAILED, STOPPED
from orchestrator.tracking.runs import Tracker

KILLS = int(os.environ.get("HEADFOLD_CHAOS_KILLS", "5"))
SEED = int(os.environ.get("HEADFOLD_CHAOS_SEED", "0"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + 600 * KILLS)]

TOO_FAST = 1e38
SEARCH = [
    "name=chaos",
    "search.kv_ratios=[0.25]",
    "promotion.steps=2",
    "promotion.top=1",
    "search.cache_formats=[q8_0]",  # all of them: tests/orchestrator/promotion/test_cache_front.py
    *LITTLE,
]
SMALL = [
    *SEARCH,
    "rungs.steps=[0,3]",  # nothing to stop in training, so that one process takes trial after trial
    "search.searcher=grid",
    "search.recipes=[gqa, least_squares, {recipe: gqa, label: again}]",  # the third is stopped where it begins
    f"search.learning_rates=[3e-4,{TOO_FAST}]",
    "search.num_samples=0",
]
LARGE = [
    *SEARCH,
    "rungs.steps=[0,1,3]",
    "search.searcher=optuna",
    "search.recipes=[gqa, least_squares]",
    "search.learning_rates=[3e-4,1e-3]",
    "search.num_samples=8",
]
SETTINGS, MEGABYTES = (SMALL, 2048) if len(KINDS) >= KILLS else (LARGE, 3072)  # a trial leaves some 130

LOAD_PLAIN = """
import sys
for name in ("attention", "search_spaces", "trainers", "orchestrator"):
    sys.modules[name] = None  # importing it raises
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
AutoTokenizer.from_pretrained(sys.argv[1])
with torch.no_grad():
    print(model.config.num_key_value_heads, model(torch.arange(40).view(1, 40)).logits.double().sum().item())
"""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[dict[str, Any]]:
    """The search left alone, what is to be compared of it, and what is gone with its cluster."""
    with arena(tmp_path_factory.mktemp("calm"), empty_store, SETTINGS, MEGABYTES, one_node=True) as place:
        refused = place.submit("refused", "search.kv_ratios=[2]", "name=refused")  # while the other runs
        result = {"place": place, "job": as_a_job(place, "calm"), "refused": ended_job(place, refused)}
        result |= {"leftovers": place.nodes.leftovers(), "files": len(list(Path(place.nodes.folder).rglob("*")))}
        result["told"] = files_with(place.token, place.storage, place.server.folder, Path(place.nodes.folder))
        yield result


def as_a_job(place: Arena, identity: str) -> dict[str, Any]:
    """The search by `ray job submit`: its log, how the job stood when the first line came, and how it ended."""
    process, seen, lines = place.submit(identity), None, []
    client = JobSubmissionClient(f"http://127.0.0.1:{place.nodes.dashboard}")
    assert process.stdout
    for line in process.stdout:
        lines.append(line)
        if line.startswith("search ") and seen is None:
            seen = client.get_job_status(identity)
    assert process.wait() == 0, "".join(lines[-50:])
    info = client.get_job_info(identity)
    return {"log": "".join(lines), "seen": seen, "status": info.status, "code": info.driver_exit_code}


def ended_job(place: Arena, process: subprocess.Popen[str]) -> dict[str, Any]:
    log = process.communicate(timeout=300)[0]
    info = JobSubmissionClient(f"http://127.0.0.1:{place.nodes.dashboard}").get_job_info("refused")
    return {"log": log, "returned": process.returncode, "status": info.status, "code": info.driver_exit_code}


def files_with(text: str, *folders: Path) -> list[str]:
    files = [p for folder in folders for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    return [str(p) for p in files if text.encode() in p.read_bytes()]


def summary(place: Arena, only: Collection[str] | None = None) -> dict[str, Any]:
    """The results of a search for each of its candidates, or of `only` these, without times and places."""
    events, outcome = read_events(place.journal), place.outcome
    promoted = outcome["promotion"].get("candidates", {}).values()
    named = {e["trial"]: json.dumps(e["config"], sort_keys=True) for e in events if e["event"] == TRIAL}
    stored = {trial: name for trial, name in named.items() if only is None or name in only}
    events = [event for event in events if event.get("trial") in stored]
    return {
        "trials": list(stored.values()),
        "decisions": [
            (stored[e["trial"]], e["result"]["rung"], e["result"]["loss"], e["decision"])
            for e in events
            if e["event"] == REPORT
        ],
        "ends": [(stored[e["trial"]], e["error"]) for e in events if e["event"] == END],
        "front": [(named[t], loss_of(outcome, t)) for t in outcome["front"]],
        "promoted": sorted((named[c["trial_id"]], c["status"], c["loss"], c["baseline_loss"]) for c in promoted),
    }


def loss_of(outcome: dict[str, Any], trial: str) -> float:
    (result,) = [t for t in outcome["trials"] if t["trial_id"] == trial]
    return result["rungs"][-1]["loss"]


def test_a_search_runs_as_a_job(calm: dict[str, Any]) -> None:
    """Its log streams, and its exit code shows success or failure."""
    job, refused = calm["job"], calm["refused"]
    assert job["seen"] == JobStatus.RUNNING, "the log came only after the job was over: " + job["log"]
    assert (job["status"], job["code"]) == (JobStatus.SUCCEEDED, 0)
    assert (refused["returned"], refused["status"], refused["code"]) == (1, JobStatus.FAILED, 2)
    assert "search.kv_ratios" in refused["log"] and "(0, 1)" in refused["log"]
    assert not (calm["place"].storage / "refused").exists()
    assert calm["leftovers"] == []


def test_a_token_in_the_tracking_address_is_reported_nowhere(calm: dict[str, Any]) -> None:
    """Not in the log, the search's folder, the MLflow server's, or Ray's."""
    place: Arena = calm["place"]
    assert "***@" in calm["job"]["log"], "the address is told, without its token"
    assert place.token not in calm["job"]["log"]
    report, host = (place.search / "search.yaml").read_text(), place.server.address.removeprefix("http://")
    assert host in report and "***@" in report
    names = {p.name for folder in (place.search, place.server.folder) for p in folder.rglob("*")}
    assert {"server.db", "report.html", "journal.jsonl"} <= names and calm["files"] > 10, "what is looked through"
    assert list(place.server.folder.rglob("report.html")), "the report is an artifact too"
    assert calm["told"] == []


def test_a_failing_trial_is_reported_and_the_others_continue(calm: dict[str, Any]) -> None:
    place: Arena = calm["place"]
    trials = load_trials(place.search)
    failed = {t.trial_id: t.error or "" for t in trials if t.status == FAILED}
    assert {t.learning_rate for t in trials if t.trial_id in failed} == {TOO_FAST}
    assert {t.status for t in trials if t.recipe == "gqa"} == {DONE, FAILED}
    assert all("Error" in error for error in failed.values())
    assert f"{len(failed)} of {len(trials)} trials failed" in calm["job"]["log"]
    assert all(error.split(":")[0] in calm["job"]["log"] for error in failed.values())
    # A copy of a failed trial is reported as failed; it has no run that failed
    own = {t.trial_id: t.error for t in read_history(place.journal).records.values() if t.status == FAILED}
    assert own and own.items() <= failed.items()
    assert {run.data.tags["trial_id"]: run.data.tags["error"] for run in mlflow_runs(place, "FAILED")} == own


def test_a_search_ends_in_an_exported_checkpoint(calm: dict[str, Any], tmp_path: Path) -> None:
    place: Arena = calm["place"]
    outcome, trials = place.outcome, load_trials(place.search)
    assert outcome["folder"] == str(place.search)
    assert {t.status for t in trials} <= {DONE, STOPPED, COPY, FAILED}
    assert {"STOP", "CONTINUE"} == {decision for *_, decision in summary(place)["decisions"]}
    losses = {t.recipe: t.loss for t in trials if t.learning_rate != TOO_FAST}
    assert losses["least_squares"] < losses["gqa"] - 1
    for t in trials:
        assert t.similarity is not None and t.seed is not None
        assert t.similarity["means"]["value_aligned"] > t.similarity["means"]["value_raw"] + 0.1
    (candidate,) = outcome["promotion"]["candidates"].values()
    assert (candidate["status"], candidate["steps"]) == ("promoted", 5)
    assert candidate["loss"] < candidate["baseline_loss"]
    check_mlflow(place)
    assert Path(outcome["report"]).stat().st_size > 10_000
    # Two of six trials are copies, and two end before they have written weights; records are estimated generously
    written = sum(path.stat().st_size for path in place.search.rglob("*") if path.is_file())
    estimated = read_json(place.search / "estimate.json")
    assert 0.35 < written / (estimated["disk_kept"] - estimated["disk_parts"]["records"]) < 1.1
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD_PLAIN, outcome["promotion"]["exported"]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split()[0] == "2"


@pytest.mark.extended
@pytest.mark.skipif(SETTINGS is not SMALL, reason="its candidates are those of the small search")
def test_a_search_whose_driver_is_killed_ends_as_one_that_was_left_alone(calm: dict[str, Any]) -> None:
    """Two of the calm search's candidates, on its cluster, and no promotion."""
    changes = ["search.recipes=[gqa, least_squares]", "search.learning_rates=[3e-4]", "promotion.enabled=false"]
    with calm["place"].beside("killed", *changes) as place:
        killer = Killer(place)
        killer.run([("driver", 0.0)])
        assert killer.done == {"driver": 1} and place.starts == 2
        result = summary(place)
        assert len(result["trials"]) == 2 and len(result["decisions"]) == 4 and result["promoted"] == []
        assert result == summary(calm["place"], result["trials"]) | {"promoted": []}
        check_mlflow(place)
        assert unfinished_files(place) == []
        assert place.nodes.leftovers() == []


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kills", "fewer"),
    [
        pytest.param([("driver", 0.0)], ["search.learning_rates=[3e-4]"], id="one"),
        pytest.param([("interrupt", 0.5)], ["search.learning_rates=[3e-4]"], id="ctrl_c"),
        pytest.param([("drain", 1.0)], ["search.learning_rates=[3e-4]"], id="with_notice"),
        pytest.param([("notice", 1.0)], ["search.learning_rates=[3e-4]"], id="by_a_cloud_s_notice"),
        pytest.param(schedule(SEED, KILLS), [], id="of_every_kind"),
    ],
)
def test_a_search_under_kills_ends_as_one_that_was_left_alone(
    kills: list[tuple[str, float]], fewer: list[str], calm: dict[str, Any], tmp_path: Path, empty_store: Path
) -> None:
    """With `fewer` of its candidates, those of the calm search have the same fate."""
    notices = any(kind in ("drain", "notice") for kind, _ in kills)
    calm["place"].nodes.close()  # room for another
    with arena(tmp_path / "chaos", empty_store, [*SETTINGS, *fewer], MEGABYTES, preemptions=notices) as place:
        killer = Killer(place)
        killer.run(kills)
        report = json.dumps({"kills": killer.done, "starts of the driver": place.starts, "when": killer.told})
        print(f"\nchaos, seed {SEED}: {report}; disk full by {'tmpfs' if place.disk.mounted else 'a file size limit'}")
        assert killer.done.total() == len(kills)
        result = summary(place)
        assert result == summary(calm["place"], result["trials"])
        assert len(result["trials"]) >= 3
        check_mlflow(place)
        assert unfinished_files(place) == []
        if "interrupt" in killer.done:  # Ctrl-C prints how to resume the search
            assert "interrupted" in place.log.read_text() and "--resume chaos" in place.log.read_text()
        assert place.nodes.leftovers() == []


@pytest.mark.extended
@pytest.mark.skipif(SETTINGS is not SMALL, reason="its candidates are those of the small search")
@pytest.mark.parametrize("kind", AT_AN_ADDRESS)
def test_a_search_at_an_address_whose_machine_changes_ends_as_one_that_was_left_alone(
    kind: str, calm: dict[str, Any], tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The working folder is lost, or an old one comes back, or a second driver takes over from one that stood still."""
    calm["place"].nodes.close()  # room for another
    fewer = ["search.learning_rates=[3e-4]"]
    with (
        bucket(monkeypatch) as address,
        arena(tmp_path / "moved", empty_store, [*SMALL, *fewer], MEGABYTES, one_node=True, address=address) as place,
    ):
        killer = Killer(place)
        killer.run([(kind, 0.5)])
        assert killer.done == {kind: 1}
        result = summary(place)
        assert len(result["trials"]) >= 3
        assert result == summary(calm["place"], result["trials"])
        assert place.nodes.leftovers() == []


def test_a_schedule_has_every_kind_equally_often() -> None:
    for count, kinds in ((5, KINDS), (30, MORE_KINDS)):
        result = [kind for kind, _ in schedule(SEED, count)]
        assert {kind: result.count(kind) for kind in kinds} == dict.fromkeys(kinds, count // len(kinds))


def mlflow_runs(place: Arena, status: str) -> list[Any]:
    tracker = Tracker.open(place.server.address, place.experiment, place.storage)
    runs = tracker.client.search_runs([tracker.experiment_id], max_results=1000)
    return [run for run in runs if run.info.status == status]


def check_mlflow(place: Arena) -> None:
    """Each trial and each promotion is one run, ended, with one point at each rung."""
    tracker = Tracker.open(place.server.address, place.experiment, place.storage)
    parent = read_json(place.search / "state.json")["parent_run"]
    names = {run.info.run_id: run for run in tracker.client.search_runs([tracker.experiment_id], max_results=1000)}
    children = [run for run in names.values() if "mlflow.parentRunId" in run.data.tags]
    assert set(names) - {run.info.run_id for run in children} == {parent}
    trials = [run for run in children if run.data.tags["headfold.kind"] == "trial"]
    records = read_history(place.journal).records
    ended = {run.data.tags.get("trial_id"): run.info.status for run in names.values() if run.info.status != "FINISHED"}
    assert ended == {t.trial_id: "FAILED" for t in records.values() if t.status == FAILED}
    assert sorted(run.data.tags["trial_id"] for run in trials) == sorted(records)
    for run in trials:
        points = tracker.client.get_metric_history(run.info.run_id, "eval_loss")
        expected = [(r["step"], r["loss"]) for r in records[run.data.tags["trial_id"]].rungs]
        assert sorted((p.step, p.value) for p in points) == expected
    kinds = sorted(run.data.tags["headfold.kind"] for run in children if run not in trials)
    assert kinds == (["promotion baseline", "promotion candidate"] if place.outcome["promotion"] else [])


def unfinished_files(place: Arena) -> list[str]:
    """Files of killed writers, in the search and among the temporary ones; Ray's own sessions are elsewhere."""
    half = [p for p in place.search.rglob("*") if p.name.endswith((".new", ".old")) or p.name.startswith(".tmp")]
    return sorted(str(p) for p in [*half, *place.scratch.iterdir()])
