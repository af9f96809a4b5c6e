"""The verb train: untrained models by seed, refusals before any work, real trainings, and resuming after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sizes import extra_parameters
from verbs import check_training_from_scratch as check
from verbs import evaluate_checkpoint, train_from_scratch

from attention.io import checkpoint
from attention.io.replacing import OutputError
from attention.modeling.composition import compositions
from attention.modeling.model_classes import plan_of, plan_of_config
from attention.plan import Composition, PlanError
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError
from orchestrator.storage.json_files import read_json
from orchestrator.tasks.train import initial_model
from orchestrator.training import run
from trainers.text.corpora import DataError

REPOSITORY = Path(__file__).resolve().parents[3]
SHORT: dict[str, Any] = {"learning_rate": 3e-3, "eval_tokens": 1024, "sequence_length": 32, "device": "cpu"}
ASKED: dict[str, Any] = {"steps": 12, "eval_every": 4, "overrides": ["train.cpus_per_worker=0.4"], **SHORT}
COMPOSED = ["train.cpus_per_worker=0.4", "composition.rank=1"]
TRAINED = ASKED | {"steps": 60, "eval_every": 6, "recipe": "dcformer", "overrides": COMPOSED}


@pytest.fixture(scope="module")
def whole(like: Path, on_group: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An undisturbed training, by workers that are there: its record, its folder `out`, and its output lines `told`."""
    out, report = tmp_path_factory.mktemp("whole") / "out", list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "dispatch_training", lambda _pool, job, *_: on_group(job))
        record = train_from_scratch(like, out, progress=report.append, **TRAINED)
    return {"record": record, "out": out, "told": report}


def test_untrained_weights_follow_from_the_seed_alone(like: Path) -> None:
    plain = plan_of_config(checkpoint.load_config(like))
    composed = replace(plain, composition=Composition())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (initial_model(like, composed, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    base, weights = initial_model(like, plain, 0).state_dict(), first.state_dict()
    assert all(torch.equal(t, again.state_dict()[name]) for name, t in weights.items())
    assert not torch.equal(weights["lm_head.weight"], other.state_dict()["lm_head.weight"])
    assert {n for n in weights if n not in base} == {n for n in weights if ".composition." in n}
    assert all(torch.equal(t, weights[name]) for name, t in base.items())
    assert [layer.key_heads for layer in plan_of(first).layers] == [2, 2]
    added = checkpoints.parameters(first) - checkpoints.parameters(initial_model(like, plain, 0))
    assert added == extra_parameters(Composition(), 2, 4, 32)


def test_composition_starts_as_in_the_paper_and_not_as_an_identity(like: Path, tmp_path: Path) -> None:
    plan = replace(plan_of_config(checkpoint.load_config(like)), composition=Composition())
    model = initial_model(like, plan, 0)
    side: Any = compositions(model)[0].places[0].query
    # W_2: 0.02 / (sqrt(2HR) (H + R)), gates: 0.05 sqrt(2 / (D + H)), with H = 4, R = 2, D = 32
    assert side.w_2.std().item() == pytest.approx(0.02 / (16**0.5 * 6), rel=0.15)
    assert side.w_2[..., 8:].abs().max() > 0
    assert side.w_gate.std().item() == pytest.approx(0.05 * (2 / 36) ** 0.5, rel=0.25)
    saved: Any = checkpoint.load(checkpoint.save(model, tmp_path / "m"))
    assert all(torch.equal(t, saved.state_dict()[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "gqa"}, "recipe: got 'gqa'.*'transformer' or 'dcformer'"),
        ({"overrides": ["composition.rank=2"]}, "composes no heads; use --recipe dcformer"),
        (
            {"recipe": "dcformer", "overrides": ["composition.ranks=2"]},
            "composition.ranks: unknown .*mean rank.*there are",
        ),
        ({"recipe": "dcformer", "overrides": ["composition.rank=true"]}, "composition.rank: got True.*a whole number"),
        ({"recipe": "dcformer", "overrides": ["composition.qk_norm=1"]}, "composition.qk_norm: got 1.*true or false"),
        ({"overrides": ["train.tuning=lora"]}, "train.tuning: random weights"),
        ({"overrides": ["train.distillation=kl"]}, "train.distillation: .*no original model"),
        ({"overrides": ["train.zero_stages=1"]}, "train.zero_stages: unknown key .did you mean zero_stage"),
        ({"overrides": ["train.seed=1"]}, "train.seed: it has its own option; give it as --seed"),
        ({"overrides": ["model.path=x"]}, "model: unknown key.*allowed here: composition, recipe, train"),
        ({"overrides": ["train"]}, "must read key=value"),
        ({"steps": 0}, "steps: got 0"),
        ({"sequence_length": 65}, "sequence_length: got 65.*at most 64 positions"),
        ({"learning_rate": 0.0}, "train.learning_rate: got 0.0"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    like: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_from_scratch(like, tmp_path / "out", **{**ASKED, **changes})
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_refused(like: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="groups must divide the 4 heads, got 3"):
        check(like, tmp_path / "out", **{**ASKED, "recipe": "dcformer", "overrides": ["composition.groups=3"]})
    with pytest.raises(ConfigError, match="architecture: no checkpoint at '/none'"):
        check("/none", tmp_path / "out", **ASKED)
    with pytest.raises(DataError, match="synthetic:induction: expected one of all, new-pairs"):
        check(like, tmp_path / "out", **{**ASKED, "train_data": "synthetic:induction"})
    chosen = tmp_path / "taken"
    chosen.mkdir()
    (chosen / "mine.txt").touch()
    with pytest.raises(OutputError, match="Headfold did not write its 'mine.txt'"):
        train_from_scratch(like, chosen, **ASKED)


def test_a_window_as_the_paper_has_it(like: Path, tmp_path: Path) -> None:
    changes = {"recipe": "dcformer", "overrides": ["composition.windowed=true", "train.beta2=0.95"]}
    result = check(like, tmp_path / "out", **{**ASKED, **changes})
    assert result.plan.composition == Composition(window=256) and result.settings.beta2 == 0.95


def test_milestones_end_with_the_last_step(like: Path, tmp_path: Path) -> None:
    def asked(**changes: Any) -> tuple[int, ...]:
        return check(like, tmp_path / "out", **{**ASKED, **changes}).milestones

    assert asked() == (4, 8, 12)
    assert asked(eval_every=5) == (5, 10, 12)
    assert asked(eval_every=50) == (12,)
    assert asked(steps=200, eval_every=None) == tuple(range(20, 201, 20))
    request = check(like, tmp_path / "out", **ASKED)
    assert request.train_tokens == 12 * 8 * 32
    assert request.checkpoint_minutes == 30 and "checkpoint_minutes" not in request.to_dict()


@pytest.mark.extended
def test_a_killed_command_resumes_to_the_same_numbers(whole: dict[str, Any], like: Path, tmp_path: Path) -> None:
    """The command with its Ray is killed after its first milestone, and called again."""
    options = ["--steps", "60", "--eval-every", "6", "--learning-rate", "3e-3", "--eval-tokens", "1024"]
    options += ["--sequence-length", "32", "--device", "cpu", "--recipe", "dcformer"]
    options += [part for override in COMPOSED for part in ("--set", override)]
    command = [sys.executable, "-m", "orchestrator.main", "train", "--architecture", str(like), *options]
    log = tmp_path / "killed.training" / "train" / "scratch" / "checkpoints.json"
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "killed")], cwd=REPOSITORY, start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 300
        while not log.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert log.exists()
    assert not (tmp_path / "killed").exists()
    assert "finished" not in read_json(tmp_path / "killed.training" / "scratch.json")
    again, record = train_from_scratch(like, tmp_path / "killed", **TRAINED), whole["record"]
    for name in ("loss", "train_loss", "step", "tokens", "weights_digest"):
        assert again[name] == record[name], name
    assert [p["loss"] for p in again["milestones"]] == [p["loss"] for p in record["milestones"]]


def test_a_training_is_measured_saved_and_not_done_twice(whole: dict[str, Any], like: Path, tmp_path: Path) -> None:
    record, out, report = whole["record"], whole["out"], whole["told"]
    assert [point["step"] for point in record["milestones"]] == list(range(6, 61, 6))
    assert record["milestones"][-1]["loss"] == record["loss"] < record["milestones"][0]["loss"] - 0.05
    assert record["tokens"] == 60 * 8 * 32
    assert len(report) == 1 + 10
    assert "training: 12 of 60 steps, " in report[2]
    assert "left" in report[2]
    model = checkpoint.load(out)
    assert plan_of(model).composition == Composition(rank=1)
    assert checkpoints.parameters(model) == record["parameters"]
    measured = evaluate_checkpoint(out, eval_tokens=1024, sequence_length=32, speed_tokens=4)
    assert measured["loss"] == pytest.approx(record["loss"], abs=1e-5)
    written = (out / "model.safetensors").stat().st_mtime_ns
    mark = out.with_name(f"{out.name}.training") / "scratch.json"
    begun = json.loads(mark.read_text())
    del begun["settings"]["collective_seconds"]  # by a version that had fewer settings
    mark.write_text(json.dumps(begun))
    again = train_from_scratch(like, out, progress=report.append, **TRAINED)
    assert again == record
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    many = ["train.num_workers=64", "train.batch_size=64"]
    with pytest.raises(ConfigError, match="64 worker.s. need 64 CPU"):
        train_from_scratch(like, tmp_path / "wide", **ASKED | {"overrides": many})
    assert not list(tmp_path.glob("wide*"))
    with pytest.raises(ConfigError, match="holds a training with another steps; give another --out"):
        train_from_scratch(like, out, **{**TRAINED, "steps": 61, "train_tokens": 60 * 8 * 32})
    out.rename(out.with_name("moved"))
    with pytest.raises(ConfigError, match="was trained and is gone"):
        train_from_scratch(like, out, **TRAINED)
