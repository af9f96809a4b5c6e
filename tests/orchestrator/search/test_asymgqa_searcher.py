"""AsymGQA's walk as trials: its chains, what becomes of results in any order, and what is submitted in the end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.tune.search import Searcher

from attention.families import geometry_of
from attention.io.checkpoint import load_config
from attention.plan import AttentionPlan
from orchestrator.config.schema import ConfigError, parse_config
from orchestrator.search.candidates import candidate_space, named_candidates, searcher_settings
from orchestrator.search.searchers import SearchProblem, make_searcher
from orchestrator.search.searchers.asymgqa import ChainSearch
from search_spaces.grouping.chain import Chain
from search_spaces.recipes.catalogue import Recipe
from search_spaces.site import SIDES


def similarities(recipe: Recipe) -> dict[tuple[int, str], np.ndarray]:
    generator = np.random.default_rng(0)
    return {(layer, side): generator.normal(size=(8, 8)) for layer in range(4) for side in SIDES}


def problem(demo_dir: Path, samples: int = 100, seed: int = 0, **search: Any) -> SearchProblem:
    section = {"recipes": ["gqa"], "kv_ratios": [0.5, 0.25], "learning_rates": [1e-4, 1e-3]} | search
    config = parse_config({"name": "x", "model": {"path": str(demo_dir)}, "search": section})
    geometry = geometry_of(load_config(demo_dir))
    space, named = candidate_space(config, geometry), named_candidates(config, geometry)
    return SearchProblem(space, named, samples, seed, searcher_settings(config), tuple(config.seeds), similarities)


def searcher_of(task: SearchProblem) -> ChainSearch:
    result = make_searcher("asymgqa", task)
    assert isinstance(result, ChainSearch)
    return result


def loss_of(plan: str) -> float:
    return 2 + int(AttentionPlan.from_json(plan).digest, 16) % 9973 / 9973


def finish(searcher: Searcher, trial_id: str, config: dict[str, Any]) -> None:
    loss = loss_of(config["plan"]) if "plan" in config else 2.0
    # A held-out loss that says the opposite: the walk must not look at it.
    searcher.on_trial_complete(trial_id, {"loss": -loss, "calibration_loss": loss})


def run(searcher: ChainSearch, parallel: int = 1, order: int = 0, fail: Any = None) -> list[dict[str, Any]]:
    """All suggestions; `parallel` trials at a time, which end in an order drawn from `order`."""
    generator = np.random.default_rng(order)
    running: dict[str, dict[str, Any]] = {}
    configs: list[dict[str, Any]] = []
    while len(configs) < 1000:
        config = searcher.suggest(f"t{len(configs)}") if len(running) < parallel else None
        if isinstance(config, dict):
            running[f"t{len(configs)}"] = config
            configs.append(config)
        elif running:
            ended = sorted(running)[int(generator.integers(len(running)))]
            done = running.pop(ended)
            if fail and fail(done):
                searcher.on_trial_complete(ended, error=True)
            else:
                finish(searcher, ended, done)
        else:
            assert config == Searcher.FINISHED
            return configs
    raise AssertionError("the searcher does not come to an end")


def skipped(searcher: ChainSearch) -> int:
    """Moves whose plan was measured already, once all chains have ended."""
    return sum(chain.moves for chain in chains(searcher)) - len(searcher._scores)


def probes(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [config for config in configs if config.get("probe")]


def finals(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [config for config in configs if config.get("probe") is False]


def chains(searcher: ChainSearch) -> list[Chain]:
    return [chain for budget in searcher._chains.values() for chain in budget]


def test_the_samples_are_spread_over_budgets_chains_and_sites(demo_dir: Path) -> None:
    searcher = searcher_of(problem(demo_dir))
    configs = run(searcher)
    assert [len(own) for own in searcher._chains.values()] == [2, 2]
    moves = [len(walk.trace) for chain in chains(searcher) for _, walk in chain.history]
    assert len(moves) == 2 * 2 * 8
    assert (sum(moves), set(moves)) == (100, {3, 4})
    assert len(probes(configs)) == 100 - skipped(searcher) > 80
    assert len({config["plan"] for config in probes(configs)}) == len(probes(configs)), "nothing is measured twice"
    assert len(configs) == searcher.total - skipped(searcher)


def test_the_best_plan_of_each_budget_is_trained_with_every_rate(demo_dir: Path) -> None:
    searcher = searcher_of(problem(demo_dir))
    configs = run(searcher, parallel=3)
    result = finals(configs)
    assert sorted((c["kv_ratio"], c["learning_rate"]) for c in result) == [
        (b, r) for b in (0.25, 0.5) for r in (1e-4, 1e-3)
    ]
    for config in result:
        plan = AttentionPlan.from_json(config["plan"])
        assert plan.kv_ratio == config["kv_ratio"]
        whole = [c for c in probes(configs) if AttentionPlan.from_json(c["plan"]).kv_ratio == config["kv_ratio"]]
        whole = [c for c in whole if c["kv_ratio"] == config["kv_ratio"]]
        assert config["plan"] in {c["plan"] for c in whole}
        assert loss_of(config["plan"]) == min(loss_of(c["plan"]) for c in whole)


def test_the_best_plan_is_trained_with_every_seed_and_probed_with_one(demo_dir: Path) -> None:
    searcher = searcher_of(problem(demo_dir, 32, seeds=[4, 5], learning_rates=[1e-3]))
    configs = run(searcher, parallel=2)
    assert {config["seed"] for config in probes(configs)} == {4}
    assert sorted((c["kv_ratio"], c["seed"]) for c in finals(configs)) == [(0.25, 4), (0.25, 5), (0.5, 4), (0.5, 5)]
    assert len({config["plan"] for config in finals(configs)}) == 2


def test_each_chain_decides_the_same_in_any_order_of_results(demo_dir: Path) -> None:
    searchers = [searcher_of(problem(demo_dir)) for _ in range(3)]
    runs = [run(searcher, *how) for searcher, how in zip(searchers, ((1, 0), (4, 1), (3, 2)), strict=True)]
    histories = [[(site, walk.trace) for c in chains(s) for site, walk in c.history] for s in searchers]
    assert histories[0] == histories[1] == histories[2]
    assert [c["plan"] for c in probes(runs[0])] != [c["plan"] for c in probes(runs[1])]
    results = [sorted((c["kv_ratio"], c["learning_rate"], c["plan"]) for c in finals(configs)) for configs in runs]
    assert results[0] == results[1] == results[2]


def test_a_chain_has_one_probe_under_way_and_the_others_continue(demo_dir: Path) -> None:
    searcher = searcher_of(problem(demo_dir, recipes=["gqa"]))
    named = [searcher.suggest(f"n{i}") for i in range(4)]
    assert all("plan" not in config for config in named)
    open_probes = {f"p{i}": searcher.suggest(f"p{i}") for i in range(4)}
    assert all(config["probe"] for config in open_probes.values())
    assert searcher.suggest("fifth") is None
    finish(searcher, "p2", open_probes["p2"])
    following = searcher.suggest("p4")
    assert following["kv_ratio"] == open_probes["p2"]["kv_ratio"]
    assert searcher.suggest("sixth") is None


def test_failed_and_diverged_probes_are_rejected(demo_dir: Path) -> None:
    searcher = searcher_of(problem(demo_dir))
    bad = lambda config: config.get("probe") and loss_of(config["plan"]) < 2.5  # noqa: E731
    configs = run(searcher, fail=bad)
    steps = [step for chain in chains(searcher) for _, walk in chain.history for step in walk.trace]
    rejected = [step for step in steps if step.score == -math.inf]
    assert 20 < len(rejected) < 80
    assert not any(step.accepted for step in rejected)
    assert all(loss_of(config["plan"]) >= 2.5 for config in finals(configs))
    diverged = searcher_of(problem(demo_dir, recipes=["gqa"]))
    for i in range(4):
        diverged.suggest(f"n{i}")
    for value in (math.nan, math.inf, None):
        config = diverged.suggest("p")
        diverged.on_trial_complete("p", {"loss": 1.0, "calibration_loss": value})
        assert diverged._scores[config["plan"]] is None


@pytest.mark.extended
@pytest.mark.parametrize("parallel", [1, 3])
def test_resumed_at_every_call_it_makes_the_same_decisions(demo_dir: Path, parallel: int) -> None:
    """Trials that were under way when the driver was killed report to the searcher of the next one."""

    class Interrupted:
        """A searcher that is created anew before every call, and given all earlier results."""

        def __init__(self) -> None:
            self.events: list[tuple[Any, ...]] = []

        def renewed(self) -> ChainSearch:
            created = searcher_of(problem(demo_dir, samples=64))
            for what, *arguments in self.events:
                getattr(created, what)(*arguments)
            return created

        def suggest(self, trial_id: str) -> Any:
            config = self.renewed().suggest(trial_id)
            if isinstance(config, dict):
                self.events.append(("add_trial", trial_id, config))
            return config

        def on_trial_complete(self, *arguments: Any) -> None:
            self.events.append(("on_trial_complete", *arguments))

    whole = run(searcher_of(problem(demo_dir, samples=64)), parallel)
    again: Any = Interrupted()
    resumed = run(again, parallel)
    by_plan = [sorted(config["plan"] for config in probes(configs)) for configs in (resumed, whole)]
    assert by_plan[0] == by_plan[1] and finals(resumed) == finals(whole) and len(finals(whole)) == 4
    assert parallel > 1 or resumed == whole


def test_a_trial_that_reports_again_changes_nothing(demo_dir: Path) -> None:
    """Tune runs a trial again whose end it had not saved."""
    searcher = searcher_of(problem(demo_dir, recipes=["gqa"]))
    for i in range(4):
        searcher.suggest(f"n{i}")
    config = searcher.suggest("p")
    finish(searcher, "p", config)
    searcher.on_trial_complete("p", {"loss": 0.0, "calibration_loss": 0.0})
    searcher.on_trial_complete("unknown", error=True)
    assert searcher._scores == {config["plan"]: -loss_of(config["plan"])}


def test_the_similarities_are_made_once_and_not_before_they_are_needed(demo_dir: Path) -> None:
    requested = []
    task = problem(demo_dir, samples=32)

    def counted(recipe: Recipe) -> dict[tuple[int, str], np.ndarray]:
        requested.append(recipe.similarity)
        return similarities(recipe)

    object.__setattr__(task, "similarities", counted)
    searcher = searcher_of(task)
    assert requested == []
    run(searcher, parallel=2)
    assert requested == ["activation"]


def test_settings_and_choices_reach_the_walk(demo_dir: Path) -> None:
    task = problem(
        demo_dir,
        kv_ratios=[0.5],
        search_space={"grouping": ["walk_symmetric"], "similarity": ["weight"], "fusion": ["norm_restored"]},
        params={"searcher.chains": 3, "grouping.iterations": 5, "grouping.accept": 0.7, "grouping.neighbours": 2},
    )
    searcher = searcher_of(task)
    configs = run(searcher)
    walks = [walk for chain in chains(searcher) for _, walk in chain.history]
    assert len(chains(searcher)) == 3
    assert {(w.accept, w.reset, w.neighbours, w.symmetric) for w in walks} == {(0.7, 0.1, 2, True)}
    choices = probes(configs)[0]["choices"]
    assert (choices["fusion"], choices["similarity"], choices["grouping"]) == (
        "norm_restored", "weight", "walk_symmetric",
    )  # fmt: skip
    for config in finals(configs):
        layers = AttentionPlan.from_json(config["plan"]).layers
        assert {len(group) for layer in layers for group in (*layer.key_groups, *layer.value_groups)} == {2}


@pytest.mark.parametrize(
    ("search", "samples", "message"),
    [
        ({}, 5, r"search\.num_samples: got 5, .* 32 probes with one move per site and 320 "),
        ({}, 321, r"search\.num_samples: got 321, "),
        ({"params": {"searcher.chains": 1}}, 15, r"search\.num_samples: got 15, .* 16 probes"),
        ({"params": {"searcher.chain": 1}}, 64, "has no setting 'chain' .did you mean chains.*; it has .*chains"),
        ({"params": {"searcher.chains": 0}}, 64, "chains must lie in"),
        (
            {"search_space": {"grouping": ["exact"], "objective": ["least_squares"]}},
            64,
            r"search\.search_space: .*objective",
        ),
        ({"search_space": {"grouping": ["walk_symmetric", "walk_asymmetric"]}}, 64, "one value for grouping"),
        ({"search_space": {"grouping": ["neighbour"]}}, 64, "choose walk_asymmetric or walk_symmetric"),
    ],
)
def test_what_cannot_be_walked_is_reported(demo_dir: Path, search: dict[str, Any], samples: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        searcher_of(problem(demo_dir, samples, **search))


def test_other_searchers_have_no_chains(demo_dir: Path) -> None:
    with pytest.raises(ValueError, match="has no setting 'chains'"):
        make_searcher("random", problem(demo_dir, 5, params={"searcher.chains": 2}))


def test_budgets_without_a_choice_need_no_probes(demo_dir: Path) -> None:
    """One head per layer: there is one plan, and it is trained."""
    searcher = searcher_of(problem(demo_dir, samples=0, kv_ratios=[0.125]))
    configs = run(searcher)
    assert (len(probes(configs)), len(finals(configs))) == (0, 2)
    with pytest.raises(ConfigError, match="got 3"):
        searcher_of(problem(demo_dir, samples=3, kv_ratios=[0.125]))
