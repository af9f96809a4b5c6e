"""The walk of AsymGQA as parallel trials: every move that it scores is a separate probe.

Several chains run at a time, each with its own generator and at most one running probe, so that
each accepts, resets and preserves as in the paper; results are taken as they arrive. A chain's
score is minus its probe's loss on the calibration tokens: the held-out text evaluates the search
and influences no decision in it. When the probes are used up, the best plan of each KV ratio is
trained through the rungs, once with every learning rate, objective of training and seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from ray.tune.search import Searcher

from attention.axes import Knob
from attention.geometry import HeadGeometry
from orchestrator.config.schema import ConfigError
from orchestrator.search.candidates import DISTILLATION, Candidate, with_objectives
from orchestrator.search.searchers.problem import SEARCHERS, ResumableSearcher, SearchProblem
from search_spaces.allocation.uniform import uniform
from search_spaces.grouping.chain import Chain, SiteKey, searched_sites
from search_spaces.planning.budgets import admissible_counts, nearest_budget
from search_spaces.recipes.catalogue import Recipe, recipe

SCORE = "calibration_loss"
_RECIPE = "asymgqa-search"
CHOSEN = ("grouping", "similarity", "alignment", "fusion", "refinement", "recovery")
"""Keys that `search.search_space` may set, one value each; the rest is as in recipe asymgqa."""


class ChainSearch(ResumableSearcher):
    """The configured candidates, then the chains' probes, then the best plan of every KV ratio.

    The best plans are trained as full trials. A plan that was measured before is not measured
    again: its score is known, and the move is made at once. So there are `total` trials at most.
    """

    def __init__(self, problem: SearchProblem, chains: int) -> None:
        self._problem, self._made = problem, 0
        self._recipe = walk_recipe(problem)
        space = problem.space
        self._trained = {
            dict(recipe.settings)[DISTILLATION]: recipe
            for recipe in with_objectives(
                self._recipe, space.distillations, space.distillation_weight
            )
        }
        self._chains = make_chains(problem, self._recipe, chains)
        self._scores: dict[str, float | None] = {}
        self._running: dict[str, str] = {}
        self._finals = list(
            itertools.product(
                self._chains, problem.space.learning_rates, self._trained, problem.seeds
            )
        )
        super().__init__(problem.total + len(self._finals))

    def suggest(self, trial_id: str) -> Any:
        """Return a trial, None while every chain waits for a result, or FINISHED."""
        if self._made < len(self._problem.named):
            candidate: Candidate | None = self._problem.named[self._made]
        else:
            candidate = self._probe(trial_id) or self._final()
        if candidate is None:
            return Searcher.FINISHED if not self._finals else None
        self._made += 1
        return candidate.config()

    def upcoming(self, count: int) -> Sequence[Candidate]:
        return self._problem.named[self._made :][:count]

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """Record a probe's score: it reports once.

        A probe that failed, or diverged, counts as rejected.
        """
        plan = self._running.pop(trial_id, None)
        if plan is None:
            return
        loss = None if error or result is None else result.get(SCORE)
        self._scores[plan] = None if loss is None or not math.isfinite(loss) else -float(loss)

    def add_trial(self, trial_id: str, config: Mapping[str, Any]) -> None:
        candidate = Candidate.from_config(config)
        if candidate.probe and candidate.plan is not None:
            # The chains repeat their moves, up to this one
            next(
                (chain for _, chain in self._walking() if self._next_plan(chain) == candidate.plan),
                None,
            )
            self._running[trial_id] = candidate.plan
        elif candidate.plan is not None:
            objective = dict(candidate.recipe.settings)[DISTILLATION]
            self._finals.remove(
                (candidate.kv_ratio, candidate.learning_rate, objective, candidate.seed)
            )
        self._made += 1

    def _probe(self, trial_id: str) -> Candidate | None:
        """Return a plan that some chain waits for and no trial measures yet."""
        for kv_ratio, chain in self._walking():
            plan = self._next_plan(chain)
            if plan is not None and plan not in self._running.values():
                self._running[trial_id] = plan
                rate, seed = self._problem.space.learning_rates[0], self._problem.seeds[0]
                return Candidate(self._recipe, kv_ratio, rate, seed, plan, probe=True)
        return None

    def _walking(self) -> list[tuple[float, Chain]]:
        """Return the unfinished chains, by ratio, those with the fewest moves first."""
        chains = [
            (kv_ratio, chain)
            for kv_ratio, chains in self._chains.items()
            for chain in chains
            if not chain.done
        ]
        return sorted(chains, key=lambda pair: pair[1].moves)

    def _next_plan(self, chain: Chain) -> str | None:
        """Return the plan that the chain waits for, or None when it is done.

        Every move whose score is known is made before.
        """
        while (plan := chain.propose_next(self._similarities)) is not None:
            text = plan.to_json()
            if text not in self._scores:
                return text
            chain.tell(self._scores[text])
        return None

    def _final(self) -> Candidate | None:
        """Return the best plan of a KV ratio whose chains have all finished.

        It is suggested once with each learning rate, objective of training and seed.
        """
        for index, (kv_ratio, rate, objective, seed) in enumerate(self._finals):
            chains = self._chains[kv_ratio]
            if all(chain.done for chain in chains):
                del self._finals[index]
                best = max(chains, key=lambda chain: chain.score)  # the first of equals
                recipe = self._trained[objective]
                return Candidate(recipe, kv_ratio, rate, seed, best.plan.to_json())
        return None

    @cached_property
    def _similarities(self) -> Mapping[SiteKey, np.ndarray]:
        if self._problem.similarities is None:
            raise ValueError("the asymgqa searcher proposes by similarity; the problem brings none")
        return self._problem.similarities(self._recipe)


def walk_recipe(problem: SearchProblem) -> Recipe:
    """Return the recipe asymgqa, scored by the whole model, with the choices of the configuration.

    They are in `search.search_space` and `search.params`.

    Raises:
        ConfigError: For a choice that is not one walk, one similarity and so on.
    """
    joint = problem.space.joint
    changes: dict[str, Any] = {}
    base = recipe("asymgqa", objective="model")
    for name, options in joint.choices.items():
        allowed = [option for option in options if option is not None]
        if name in CHOSEN and len(allowed) == 1:
            changes[name] = allowed[0]
        elif name in CHOSEN or getattr(base, name, None) not in allowed:
            expected = (
                f"{name} {getattr(base, name)!r} only"
                if name not in CHOSEN
                else f"one value for {name}"
            )
            raise ConfigError(
                f"search.search_space: got {name}: {allowed}, but the asymgqa searcher takes "
                f"{expected}"
            )
    if not changes.get("grouping", base.grouping).startswith("walk_"):
        raise ConfigError(
            f"search.search_space: got grouping: [{changes['grouping']}], but the asymgqa searcher "
            "walks; choose walk_asymmetric or walk_symmetric"
        )
    changed = base.with_changes(**changes)
    engine = joint.engine
    if engine and (
        reasons := engine.refusals(changed.to_dict(), equal_groups=changed.equal_groups)
    ):
        raise ConfigError(
            f"search.target: the asymgqa searcher cannot be: {'; '.join(reasons)}; choose target "
            "any"
        )
    settings = {
        name: value for name, value in joint.settings.items() if name in dict(changed.settings)
    }
    return replace(changed.with_changes(settings=settings), name=_RECIPE)


def make_chains(problem: SearchProblem, walk: Recipe, chains: int) -> dict[float, list[Chain]]:
    """Return the chains of every KV ratio.

    The samples are spread evenly over them and their sites, the first sites first.

    Raises:
        ConfigError: For a KV ratio that cannot be met, and for fewer samples than one move per
            site, or more than `grouping.iterations` allows.
    """
    joint = problem.space.joint
    geometry = cast(HeadGeometry, joint.geometry)
    counts = {}
    for kv_ratio in map(float, joint.kv_ratios):
        try:
            budget = nearest_budget(walk, kv_ratio, geometry)
        except ValueError as error:
            raise ConfigError(f"search.kv_ratios: {error}") from None
        admissible = admissible_counts(walk, geometry)
        counts[kv_ratio] = uniform(
            geometry.num_layers, geometry.num_kv_heads, budget, admissible=admissible
        )
    sites = {
        kv_ratio: list(searched_sites(counts[kv_ratio], geometry.num_kv_heads))
        for kv_ratio in counts
    }
    moves = _spread(problem.samples, sites, chains, walk.knobs("grouping")["iterations"])
    settings = {
        k: v for k, v in walk.knobs("grouping").items() if k not in ("iterations", "equal_sizes")
    }
    settings["symmetric"] = walk.grouping == "walk_symmetric"
    generators = np.random.default_rng(problem.seed).spawn(len(moves))
    by_ratio: dict[float, list[Chain]] = {kv_ratio: [] for kv_ratio in counts}
    for ((kv_ratio, _), at_sites), generator in zip(moves.items(), generators, strict=True):
        by_ratio[kv_ratio].append(Chain(geometry, counts[kv_ratio], at_sites, generator, settings))
    return by_ratio


def _spread(
    samples: int, sites: Mapping[float, list[SiteKey]], chains: int, iterations: int
) -> dict[tuple[float, int], dict[SiteKey, int]]:
    """Return the moves at each site of each chain (KV ratio, index), `samples` in all.

    Raises ConfigError if they do not fit.
    """
    targets = [
        (kv_ratio, index, keys[position])
        for position in range(max(map(len, sites.values())))
        for kv_ratio, keys in sites.items()
        if position < len(keys)
        for index in range(chains)
    ]
    if not len(targets) <= samples <= iterations * len(targets):
        walked = " and ".join(
            f"{len(keys)} sites at {kv_ratio:g}" for kv_ratio, keys in sites.items()
        )
        raise ConfigError(
            f"search.num_samples: got {samples}, but {chains} chain(s) for each budget, with "
            f"{walked}, make {len(targets)} probes with one move per site and "
            f"{iterations * len(targets)} with grouping.iterations {iterations}; choose a number "
            "between them, or other searcher.chains or grouping.iterations in search.params"
        )
    each, more = divmod(samples, len(targets)) if targets else (0, 0)
    moves: dict[tuple[float, int], dict[SiteKey, int]] = {
        key: {} for key in itertools.product(sites, range(chains))
    }
    for number, (kv_ratio, index, site) in enumerate(targets):
        moves[kv_ratio, index][site] = each + (number < more)
    return moves


@SEARCHERS.part(
    "asymgqa",
    source="Chen 2024 (AsymGQA), sec. 2.1, Alg. 1 and 2, as parallel chains",
    knobs=(Knob("chains", "int", "walks at a time for each KV ratio", low=1, high=1024),),
)
def asymgqa(problem: SearchProblem, *, chains: int = 2) -> ResumableSearcher:
    """Return the searcher. Raises ConfigError for choices, ratios or samples that it cannot use."""
    return ChainSearch(problem, chains)
