"""The losses of a conversion by step: each step towards our recipes, with and without the local fit.

    python -m benchmarks.combinations MODEL [--shares 0.5,0.25] [--formats f16 q8_0] [--data TEXT]

prints the table of one model; as the benchmark `combinations` it is of the demo checkpoint. From means of neighbours
one thing is changed after the other: heads by least squares, groups by their cost, a head count of each layer's own, or
heads of a larger width. Each without any fit and with the same steps of it, and each with its cache in the formats of
engines, in bytes of those relative to the original's cache in 16 bits. Nothing is trained.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from transformers import PreTrainedModel

from attention.base.timing import Phases
from attention.cache_formats import CachePair, format_record
from attention.engine_cache import engine_cache, with_engine_heads
from attention.modeling.model_classes import plan_of
from benchmarks.report import Row, Scale, benchmark
from orchestrator.config.options import ConvertOptions
from orchestrator.conversion.execution import convert_and_refine, cost
from orchestrator.conversion.memory_store import MemoryStore
from orchestrator.storage.shipped import shipped
from orchestrator.tasks.convert import Convert
from search_spaces.recipes.catalogue import recipe
from search_spaces.recipes.recipe import Recipe
from trainers.evaluation import evaluate

FIT = "fit_heal"
STEPS: Mapping[str, Recipe] = {
    "means of neighbours": recipe("gqa"),
    "+ least squares": recipe("least_squares").with_changes(grouping="neighbour"),
    "+ groups": recipe("least_squares"),
    "+ budgets by layer": recipe("headfold_layers").with_changes(refinement="none"),
    "+ width": recipe("headfold_wide").with_changes(refinement="none"),
}


@dataclass(frozen=True)
class Conversion:
    """A conversion at a share of the KV heads.

    Attributes:
        name: Of its step, with `, fitted` if it is.
        heads: The share of the KV heads' numbers that it uses.
        steps: Optimizer steps of single layers.
        seconds: Of planning, converting and fitting.
    """

    name: str
    heads: float
    model: PreTrainedModel
    steps: float
    seconds: float


@dataclass(frozen=True)
class Result:
    """Loss increase of a conversion with its cache in a format, nats per token."""

    conversion: Conversion
    cache_format: str
    share: float
    increase: float
    error: float | None

    def __str__(self) -> str:
        conversion = self.conversion
        deviation = "" if self.error is None else f" ± {self.error:.4f}"
        cells = [conversion.name, f"{conversion.heads:.1%}", self.cache_format, f"{self.share:.1%}"]
        cells += [f"{self.increase:+.4f}{deviation}", f"{conversion.steps:.0f}", f"{conversion.seconds:.0f} s"]
        return f"| {' | '.join(cells)} |"


HEADER = "| | heads | cache | engine bytes | loss increase | steps of fits | time |\n|---|---|---|---|---|---|---|"


def conversion(store: MemoryStore, name: str, one: Recipe, budget: Fraction) -> Conversion:
    """Convert the checkpoint of a store by a recipe, by the calibration that is there."""
    original = store.request.checkpoint.plan.kv_bytes_per_token("float16")
    phases = Phases()
    store.request = replace(store.request, recipe=one)
    before, planned = sum(store.phases.values()), len(store.context.work)
    plan = store.plan(budget)
    planning = sum(store.phases.values()) - before
    model, fits = convert_and_refine(one, plan, store.context, phases)
    work = cost([*store.context.work[planned:], *fits], phases)
    heads = plan.kv_bytes_per_token("float16") / original
    return Conversion(name, heads, model, work["optimizer_steps"], planning + sum(phases.values()))


def budget_of(store: MemoryStore, one: Recipe, share: float) -> Fraction:
    """Return the largest budget of a recipe of at most `share`. Raises ValueError where it has none."""
    return replace(store.request, recipe=one).budget(share)


def conversions(store: MemoryStore, arms: Mapping[str, Recipe], share: float) -> Iterator[Conversion]:
    """Yield the conversions of some recipes; one that has no plan of at most `share` is reported."""
    for name, one in arms.items():
        try:
            budget = budget_of(store, one, share)
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        yield conversion(store, name, one, budget)


def measured(
    model: str,
    shares: Sequence[float],
    formats: Sequence[str],
    steps: Sequence[str] = tuple(STEPS),
    fit_steps: int = 720,
    **sizes: Any,
) -> Iterator[Result]:
    """Yield every step with and without the fit, in every format, on one model.

    Args:
        model: Folder, GGUF file or hub name.
        shares: Of its KV heads, at most.
        formats: Of the cache.
        steps: Names of `STEPS`.
        fit_steps: Of the local fit of a layer.
        sizes: Options of `headfold convert` on texts and their sizes.
    """
    task = Convert(ConvertOptions(model=model, recipe="headfold_gqa", kv_ratio=list(shares), layerwise=False, **sizes))
    store = MemoryStore(task.request, always_calibrate=True)
    original = task.request.checkpoint.plan
    arms: dict[str, Recipe] = {}
    fit: dict[str, Any] = {"refinement": FIT, "refinement.fit_steps": fit_steps}
    for name in steps:
        arms |= {name: STEPS[name], f"{name}, fitted": STEPS[name].with_changes(**fit)}
    whole = Conversion("the checkpoint as it is", 1.0, store.original, 0, 0.0)
    every_conversion = itertools.chain([whole], *(conversions(store, arms, share) for share in shares))
    for each in every_conversion:
        if each is whole and list(formats) == ["f16"]:
            continue
        for name in formats:
            plain = name == "f16"
            pair = CachePair.parse(name)
            engine_model = each.model if plain else with_engine_heads(each.model)  # some exist only in our own form
            with engine_cache(engine_model, None if plain else pair):
                comparison = evaluate(engine_model, store.texts.held_out).compared(store.original_evaluation)
            share = each.heads if plain else format_record(pair, plan_of(engine_model), original)["share"]
            yield Result(each, name, share, comparison["loss_increase"], comparison["loss_increase_stderr"])


@benchmark("combinations", devices=("cpu",))
def combinations(scale: Scale) -> Iterator[Row]:
    """Measure each step towards our recipes on the demo checkpoint, with and without the local fit."""
    path = str(shipped("examples/stdlib-llama/config.json").parent)
    sizes = {"calibration_tokens": scale.pick(1024, 8192), "eval_tokens": scale.pick(512, 8192)}
    steps = scale.pick(("+ least squares",), tuple(STEPS))
    shares = scale.pick([0.5], [0.5, 0.25])
    for each in measured(path, shares, ["f16"], steps, scale.pick(12, 720), sequence_length=256, **sizes):
        error = "" if each.error is None else f" ± {each.error:.4f}"
        note = f"{each.share:.1%} of the bytes; increase {each.increase:+.4f}{error}; {each.conversion.steps:.0f} steps"
        yield Row(each.conversion.name, max(1e-6, each.increase), None, "nats", note)


def model_parser(description: str, shares: str) -> argparse.ArgumentParser:
    """Return a parser of a model, shares of its cache, and what it is calibrated and measured on."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("model", help="folder, GGUF file or hub name")
    parser.add_argument("--shares", default="0.5,0.25", help=shares)
    parser.add_argument("--data", help="text to calibrate and to measure on")
    parser.add_argument("--calibration-tokens", type=int)
    parser.add_argument("--eval-tokens", type=int)
    parser.add_argument("--sequence-length", type=int)
    return parser


def shares_of(arguments: argparse.Namespace) -> list[float]:
    return [float(share) for share in arguments.shares.split(",")]


def sizes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `headfold convert` on texts and their sizes."""
    names = ("calibration_tokens", "eval_tokens", "sequence_length")
    return {"calibration_data": arguments.data} | {name: getattr(arguments, name) for name in names}


def main(words: Sequence[str] | None = None) -> None:
    parser = model_parser(__doc__ or "", "of its KV heads, at most")
    parser.add_argument("--formats", nargs="*", default=["f16"], help="of the cache")
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=list(STEPS))
    arguments = parser.parse_args(words)
    print(HEADER, flush=True)
    for each in measured(
        arguments.model, shares_of(arguments), arguments.formats, arguments.steps, **sizes_of(arguments)
    ):
        print(each, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
