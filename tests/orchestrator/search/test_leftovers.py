"""Files of ended trials on disk: training checkpoints of real trainings, in the folder of a search."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from journals import write_journal

from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from benchmarks.needs.alone import Alone
from orchestrator.config.schema import ConfigError, SearchConfig, parse_config
from orchestrator.search.leftovers import Cleaning, check_promotable_weights, finalists, remove_leftovers
from orchestrator.storage.journal import ADVANCE, END, Journal, read_history
from orchestrator.storage.paths import SearchFolder
from orchestrator.storage.records import COPY, DONE, FAILED, RUNNING, STOPPED, WAITING, TrialRecord
from trainers.jobs.checkpoints import CheckpointStore
from trainers.jobs.run import run_job
from trainers.jobs.train_job import TrainJob
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import TrainSettings
from trainers.zero import group_of_one

CONFIG = parse_config({"name": "x", "model": {"path": "x"}, "search": {"kv_ratios": [0.5]}})
LOSSES = {"best": 2.0, "base": 3.0, "worse": 2.5, "stopped": 2.6, "paused": 2.4, "running": 2.1, "lost": 1.0,
          "failed": 1.5, "copy": 2.0}  # fmt: skip
STATUS = {"stopped": STOPPED, "paused": WAITING, "running": RUNNING, "lost": FAILED, "failed": FAILED, "copy": COPY}
UNTOUCHED = {"paused", "running", "lost"}


@pytest.fixture(scope="module")
def trained(tiny_job: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainJob, Path]:
    """The job of a trial of two rungs after a relaxation of two stages, run in a folder of a search."""
    group_of_one()
    root, generator = tmp_path_factory.mktemp("trained"), torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 64, (rows, 16), generator=generator) for rows in (100, 9)]
    half, quarter = (AttentionPlan((LayerPlan(groups, groups),) * 2, head_dim=8) for groups in ((0, 0, 1, 1), (0,) * 4))
    spec = RelaxationSpec("lagrangian", (half.to_json(), quarter.to_json()), 2, save_every=1)
    settings = TrainSettings(learning_rate=3e-3, seed=1)
    job: TrainJob = tiny_job(root / "made", half, *texts, settings, milestones=(2, 4), keep_best=True)
    own = root / "demo" / "trials" / "best"
    for name in ("start", "converted"):
        shutil.copytree(str(job.teacher_dir if name == "start" else job.model_dir), own / name)
    places = {"storage_path": str(root / "demo" / "train"), "run_name": "best", "out_dir": str(own / "trained")}
    job = replace(job, **places, model_dir=str(own / "start"), relaxation=spec)
    run_job(job, Alone())
    return job, root / "demo"


@pytest.fixture
def folder(trained: tuple[TrainJob, Path], tmp_path: Path) -> SearchFolder:
    """A search with trials of each kind, all of which have left as much as that one."""
    _, created = trained
    folder = SearchFolder(tmp_path / "demo")
    index = (created / "train" / "best" / "checkpoints.json").read_text()
    trials = []
    for name, loss in LOSSES.items():
        shutil.copytree(created / "trials" / "best", folder.trial(name))
        shutil.copytree(created / "train" / "best", folder.train / name)
        here = index.replace(str(created), str(folder.root))
        for before, after in (("trials/best/", f"trials/{name}/"), ("train/best/", f"train/{name}/")):
            here = here.replace(before, after)
        (folder.train / name / "checkpoints.json").write_text(here)
        rungs = [{**report, "step": report["step"] + 4} for report in json.loads(here)["reports"]]
        rungs[-1]["loss"] = loss
        recipe = "gqa" if name == "base" else "dha"
        status, copied = STATUS.get(name, DONE), "best" if name == "copy" else None
        trials.append(TrialRecord(name, recipe, 0.5, 1e-3, {}, status, rungs, 64, copy_of=copied))
    write_journal(folder.root, trials)
    lines = [json.loads(line) for line in folder.journal.read_text().splitlines()]
    lines = [line | ({"lost": True} if (line["event"], line.get("trial")) == (END, "lost") else {}) for line in lines]
    folder.journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def files(folder: SearchFolder, name: str) -> dict[str, int]:
    """Size of each file of a trial."""
    roots = folder.trial(name), folder.train / name
    return {str(p.relative_to(folder.root)): p.stat().st_size for r in roots for p in r.rglob("*") if p.is_file()}


def optimiser(folder: SearchFolder, name: str) -> list[Path]:
    return [path for root in (folder.trial(name), folder.train / name) for path in root.rglob("*.pt")]


def clean(folder: SearchFolder, config: SearchConfig = CONFIG) -> None:
    remove_leftovers(config, folder, read_history(folder.journal))


def test_optimisers_stay_where_a_promotion_or_a_resumption_continues(folder: SearchFolder) -> None:
    before = {name: files(folder, name) for name in LOSSES}
    clean(folder)
    assert {name for name in LOSSES if optimiser(folder, name)} == UNTOUCHED | {"best", "base"}
    for name in LOSSES:
        remaining, store = files(folder, name), CheckpointStore(str(folder.train), name)
        checkpoints, reports = store.read()
        assert [report["step"] for report in reports] == [2, 4]
        if name in UNTOUCHED:
            assert remaining == before[name]
            continue
        assert [k.step for k in checkpoints] == ([4] if name in ("best", "base") else [])
        trial_folder = folder.trial(name)
        assert not (trial_folder / "start").exists() and not (trial_folder / "trained.relaxed" / "stage-0").exists()
        weights = ("trained", *(() if name == "copy" else ("converted",)))
        assert all(checkpoint.intact(trial_folder / each) for each in weights)
        assert (trial_folder / "converted").exists() == (name != "copy")
        assert checkpoint.intact(trial_folder / "trained.relaxed" / "stage-1" / "collapsed")
    spent = sum(sum(files(folder, name).values()) for name in LOSSES if name not in UNTOUCHED)
    assert spent < 0.6 * sum(sum(before[name].values()) for name in LOSSES if name not in UNTOUCHED)
    again = {name: files(folder, name) for name in LOSSES}
    clean(folder)
    assert {name: files(folder, name) for name in LOSSES} == again


def test_a_finalist_resumes_from_the_remaining_files(trained: tuple[TrainJob, Path], folder: SearchFolder) -> None:
    job, _ = trained
    clean(folder)
    last = read_history(folder.journal).records["best"].last
    going_on = replace(
        job.after_relaxation(last["relaxed_dir"]), start_step=4, resume_from=last["checkpoint_path"], total_steps=6,
        milestones=(6,), storage_path=str(folder.train), run_name="more", out_dir=str(folder.root / "more"),
    )  # fmt: skip
    assert run_job(going_on, Alone())["metrics"]["step"] == 6


def test_more_finalists_keep_more(folder: SearchFolder) -> None:
    section = CONFIG.promotion.model_copy(update={"top": 2})
    clean(folder, CONFIG.model_copy(update={"promotion": section}))
    assert optimiser(folder, "worse") and not optimiser(folder, "stopped")


def test_only_what_a_promotion_takes_keeps_its_weights_where_that_is_requested(folder: SearchFolder) -> None:
    section = CONFIG.promotion.model_copy(update={"keep_weights": "finalists"})
    clean(folder, CONFIG.model_copy(update={"promotion": section}))
    for name in LOSSES:
        stored = {path.parent.name for path in folder.trial(name).rglob("*.safetensors")}
        if name in UNTOUCHED:
            assert {"converted", "trained"} <= stored
        else:
            assert ("converted" in stored) == (name in ("best", "base")) == bool(stored)
            assert (folder.trial(name)).is_dir(), "recipe and plan stay"


def test_another_promotion_may_not_select_what_has_lost_its_weights(folder: SearchFolder) -> None:
    def promoting(**changes: Any) -> SearchConfig:
        section = CONFIG.promotion.model_copy(update={"keep_weights": "finalists"} | changes)
        return CONFIG.model_copy(update={"promotion": section})

    check_promotable_weights(folder, promoting(top=3))  # nothing has been removed
    clean(folder, promoting())
    check_promotable_weights(folder, promoting())
    check_promotable_weights(folder, promoting(top=3, enabled=False))
    with pytest.raises(ConfigError, match="selects stopped, worse, whose weights were removed"):
        check_promotable_weights(folder, promoting(top=3))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_kill_while_removing_is_made_good(folder: SearchFolder, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """At any moment the index names no checkpoint that is not there; the next time removes the rest."""
    calls, real = [0], shutil.rmtree

    def dying(path: Any, **options: Any) -> None:
        calls[0] += 1
        if calls[0] > at:
            raise KeyboardInterrupt
        real(path, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", dying)
        clean(folder)
    for name in LOSSES:
        store = CheckpointStore(str(folder.train), name)
        assert all(store.folder(checkpoints).is_dir() for checkpoints in store.read()[0])
    clean(folder)
    assert {name for name in LOSSES if optimiser(folder, name)} == UNTOUCHED | {"best", "base"}


def test_an_address_that_is_away_ends_nothing(folder: SearchFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    history = read_history(folder.journal)
    known: dict[str, bool] = {}

    def away(*_: Any) -> None:
        raise OSError("the bucket is away")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "keep_only", away)
        remove_leftovers(CONFIG, folder, history, known)
    assert not known and optimiser(folder, "worse")
    remove_leftovers(CONFIG, folder, history, known)
    assert known["best"] and not optimiser(folder, "worse")


def test_while_tune_runs_it_follows_the_journal(folder: SearchFolder) -> None:
    journal = Journal(folder.journal)
    cleaning = Cleaning(CONFIG, folder, journal.history)
    cleaning.on_step_end(1, [])
    assert optimiser(folder, "best") and optimiser(folder, "running")
    journal.append(END, trial="running", error=None, trace=None, lost=False, bare=False)
    journal.append(ADVANCE, trial="paused")
    cleaning.on_step_end(2, [])
    # Its goal was 2.1, which is dominated by 2.0
    assert optimiser(folder, "best") and optimiser(folder, "paused") and not optimiser(folder, "running")
    better = {**journal.history.records["paused"].last, "loss": 1.9, "step": 10, "rung": 1}
    journal.append("report", trial="paused", result=better, decision="CONTINUE")
    journal.append(END, trial="paused", error=None, trace=None, lost=False, bare=False)
    cleaning.on_step_end(3, [])
    assert optimiser(folder, "paused") and not optimiser(folder, "best")


TRIALS = st.lists(
    st.tuples(st.sampled_from(("gqa", "a", "b")), st.sampled_from((0.5, 0.25)), st.sampled_from((1.0, 2.0, 3.0))),
    min_size=1,
    max_size=12,
)


@given(TRIALS, st.sampled_from(("front", "best_per_budget")), st.integers(1, 3))
def test_what_is_no_finalist_will_never_be_one(given_trials: list[Any], how: str, top: int) -> None:
    """So nothing is removed that a later end would call for."""
    section = CONFIG.promotion.model_copy(update={"select": how, "top": top})
    config, trials = CONFIG.model_copy(update={"promotion": section}), []
    out: set[str] = set()
    for number, (recipe, ratio, loss) in enumerate(given_trials):
        rungs = [{"step": 1, "loss": loss}]
        # Ids fall, so that among equals the later one comes first
        trials.append(TrialRecord(f"t{99 - number}", recipe, ratio, 1e-3, {}, DONE, rungs, int(100 * ratio)))
        now = finalists(trials, config)
        assert not now & out
        out |= {t.trial_id for t in trials} - now
