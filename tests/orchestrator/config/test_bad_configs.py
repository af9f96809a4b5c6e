"""Thousands of bad configurations and plans: each refused by a message that names the place, before any cluster."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzzing import Bad, at, bad_configs, bad_plans

import orchestrator.pipeline as search_module
from attention.plan import AttentionPlan, Composition, HeadShare, LayerPlan, PlanError
from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError, parse_config, read_search_config
from orchestrator.main import _mistake
from orchestrator.search.texts import SearchTexts
from orchestrator.tracking.runs import Tracker
from trainers.text import data

REPOSITORY = Path(__file__).resolve().parents[3]
REQUIRED = (
    ("name",),
    ("model",),
    ("model", "path"),
    ("search",),
    ("search", "kv_ratios"),
    ("search", "recipes", 1, "recipe"),
)
LONGEST_MESSAGE = 2500


class ClusterStarted(Exception):
    """A configuration came through all checks."""


def sound(demo_dir: Path, storage: Path) -> dict[str, Any]:
    """A configuration with every section and most keys given."""
    arm = {"recipe": "headfold", "label": "mine", "kv_ratios": [0.5], "changes": {}, "params": {}}
    return {
        "name": "small",
        "model": {"path": str(demo_dir), "teacher": str(demo_dir), "dtype": "float32"},
        "data": {
            "source": "stdlib",
            "sequence_length": 32,
            "train": {"tokens": 3200, "source": "stdlib"},
            "eval": {"tokens": 320},
            "calibration": {"tokens": 320},
        },
        "search": {
            **{"searcher": "optuna", "recipes": ["gqa", arm], "kv_ratios": [0.5, 0.25], "learning_rates": [1e-3]},
            **{
                "num_samples": 2,
                "search_space": {"grouping": ["exact", "merge"]},
                "params": {"grouping.equal_sizes": True},
            },
            **{"baseline": "gqa", "seed": 0, "seeds": [0]},
        },
        "rungs": {"steps": [0, 8], "reduction_factor": 2.0, "stop": True, "scheduler": "asha", "params": {}},
        "train": {
            **{
                "learning_rate": 1e-3,
                "weight_decay": 0.01,
                "warmup_fraction": 0.1,
                "batch_size": 8,
                "micro_batch_size": 8,
            },
            **{"zero_stage": 1, "dtype": "fp32", "num_workers": 1, "cpus_per_worker": 0.5, "gpus_per_worker": 0.0},
        },
        "promotion": {"enabled": True, "select": "front", "top": 1, "steps": 4, "margin": 0.0, "registered_name": "x"},
        "tracking": {"experiment": "mine"},
        "storage": str(storage),
        "resources": {"max_concurrent": "auto", "trial_cpus": 0.05, "trial_gpus": 0.0},
    }


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, demo_dir: Path) -> Any:
    """`search`, all of it up to the start of the cluster, which raises; the checkpoint's config is read once.

    Texts are found but not tokenised (test_validation does that), nor is there an MLflow store (test_tracking).
    """

    @contextlib.contextmanager
    def started() -> Any:
        raise ClusterStarted
        yield

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(search_module, "connected", started)
    monkeypatch.setattr(Tracker, "open", lambda *a: None)
    monkeypatch.setattr(data, "resolve", functools.lru_cache(data.resolve))
    monkeypatch.setattr(SearchTexts, "complete", lambda self: [])
    monkeypatch.setattr(SearchTexts, "make_small", lambda self: None)
    monkeypatch.setattr(checkpoints, "open_checkpoint", functools.lru_cache(checkpoints.open_checkpoint))
    with pytest.raises(ClusterStarted):
        search_module.search(parse_config(sound(demo_dir, tmp_path / "runs")))
    return search_module.search


def refused(bad: Bad, check: Any) -> bool:
    """Whether a record is refused; fails unless the message is short and names the place."""
    value = repr(at(bad.record, bad.place))[:200] if _there(bad) else "(taken away)"
    try:
        check(bad.record)
    except ClusterStarted:
        assert not bad.sure, f"{bad.told}: {value} was taken"
        return False
    except Exception as error:
        message = str(error)
        assert _mistake(error), f"{bad.told}: {value} gave {type(error).__name__}: {message[:300]}"
        missing = [word for word in _named(bad) if word not in message]
        assert not missing, f"{bad.told}: {value} gave a message without {missing}: {message[:300]}"
        assert len(message) < LONGEST_MESSAGE, f"{bad.told}: {value} gave a message of {len(message)} characters"
        return True
    raise AssertionError("a search went through without a cluster")


def _named(bad: Bad) -> list[str]:
    """The place that a message must name: section and key; of an arm the arm, since its axes follow."""
    if bad.place[:2] == ("search", "recipes") and len(bad.place) == 4 and bad.place[-1] in ("changes", "params"):
        return ["search.recipes"]
    key = next(key for key in reversed(bad.place) if not isinstance(key, int))
    return [str(bad.place[0]), str(key)]


def _there(bad: Bad) -> bool:
    try:
        at(bad.record, bad.place)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def run_configs(expected: int, seed: int, checked: Any, demo_dir: Path, tmp_path: Path) -> None:
    count, limit = 0, 2 * expected
    for number, bad in enumerate(bad_configs(sound(demo_dir, tmp_path / "runs"), REQUIRED, seed)):
        count += refused(bad, lambda record: checked(parse_config(record)))
        if count == expected:
            return
        assert number < limit, f"only {count} of {number} were refused: what makes them makes too few bad ones"


def test_bad_configurations_are_refused_by_name(checked: Any, demo_dir: Path, tmp_path: Path) -> None:
    run_configs(200, 0, checked, demo_dir, tmp_path)
    assert not list(tmp_path.glob("runs/small*")), "nothing of a search may exist after a refusal"


@pytest.mark.extended
def test_two_thousand_bad_configurations_are_refused_by_name(checked: Any, demo_dir: Path, tmp_path: Path) -> None:
    run_configs(2000, 1, checked, demo_dir, tmp_path)


def test_a_thousand_bad_plans_are_refused_by_name() -> None:
    layers = (LayerPlan.identity(4), LayerPlan((0, 1, 0, 1), (0, 0, 1, 1)), LayerPlan.identity(4))
    plan = AttentionPlan(layers, 8, (HeadShare(2, 1, 0, 3),), Composition(rank=2))
    count = 0
    for bad in bad_plans(json.loads(plan.to_json()), 0):
        try:
            result = AttentionPlan.from_json(json.dumps(bad.record))
        except PlanError as error:
            report = str(error)
            assert re.search(r"\b(format|head_dim|(mlp_)?shares?|composition|layers?|field)\b", report), report
            if bad.sure and len(bad.place) > 1:
                assert str(bad.place[0]) in report and str(bad.place[1]) in report, f"{bad.told}: {report}"
            assert len(report) < LONGEST_MESSAGE
            count += 1
        else:
            assert not bad.sure, f"{bad.told} was taken"
            assert AttentionPlan.from_json(result.to_json()) == result
        if count == 1000:
            return


def test_broken_yaml_is_refused_with_the_file(tmp_path: Path) -> None:
    rng, text = random.Random(0), (REPOSITORY / "configs" / "demo.yaml").read_text()
    file, count = tmp_path / "mine.yaml", 0
    for _ in range(150):
        start = rng.randrange(len(text))
        extra = "".join(rng.choice("{}[]:,&*!|>%@`'\"\t\n-#?=\x00\x85é0 ") for _ in range(rng.randrange(1, 4)))
        file.write_text(text[:start] + extra + text[start + rng.randrange(4) :], encoding="utf-8")
        try:
            read_search_config(file)
        except ConfigError as error:
            assert str(file) in str(error)
            assert len(str(error)) < LONGEST_MESSAGE
            count += 1
    assert count > 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: &x [*x]\n", "name: got"),
        ("name: " + "[" * 1000 + "]" * 1000, "YAML"),
        ("name: a\nmodel: {path: x}\nname: b\n", "name is given twice"),
        ("name: !!python/object/apply:os.system ['true']\n", "python/object"),
        ("name: !!int ''\n", "YAML"),
        ("name: 2026-99-99\n", "YAML"),
        ("name: " + "9" * 5000 + "\n", "YAML"),
        ("- a\n", "mapping"),
        ("", "mapping"),
        ("name: \xff", "YAML"),
    ],
    ids=["cycle", "deep", "twice", "object", "int", "date", "digits", "list", "empty", "latin1"],
)  # fmt: skip
def test_yaml_that_no_configuration_can_be(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=message) as caught:
        read_search_config(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("share", ["1.2.3%", ".%", "%"])
def test_a_mistyped_percentage_is_refused_by_its_key(share: str) -> None:
    with pytest.raises(ConfigError, match=r"search\.kv_ratios"):
        read_search_config(REPOSITORY / "configs" / "demo.yaml", [f"search.kv_ratios=['{share}']"])


def test_bad_overrides_are_refused_by_name() -> None:
    rng = random.Random(0)
    keys = (
        "name",
        "search.num_samples",
        "search.kv_ratios",
        "train",
        "train.x",
        "model.path.x",
        "",
        ".",
        "..",
        "a.b.c",
    )
    values = ("", "=", "[", "{a", "!!int ''", "2026-99-99", "nan", ".inf", "yes", "{}", "[[]]", "&a [*a]", "9" * 5000)
    file, count = REPOSITORY / "configs" / "demo.yaml", 0
    for _ in range(100):
        key = rng.choice(keys)
        override = key + rng.choice(("=", "=", "=", "", ":")) + rng.choice(values)
        try:
            read_search_config(file, [override])
        except ConfigError as error:
            assert key.partition(".")[0] in str(error), f"{override[:60]}: {error}"
            assert len(str(error)) < LONGEST_MESSAGE
            count += 1
    assert count > 70


def test_the_demo_configuration_is_taken() -> None:
    """The above must not become a refusal of everything."""
    file = REPOSITORY / "configs" / "demo.yaml"
    record = yaml.safe_load(file.read_text())
    assert parse_config(record) == read_search_config(file)
