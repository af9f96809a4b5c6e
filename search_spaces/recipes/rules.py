"""Combinations that are not allowed, with reasons.

Declared once: recipes refuse it, and the joint space never proposes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any

from attention.geometry import HeadGeometry
from attention.plan import Composition, PlanError
from search_spaces.axes import ALLOCATION, GROUPING, OBJECTIVE, SHARING, SIMILARITY

Rule = tuple[tuple[str, ...], Callable[..., str | None]]
EQUAL_SIZES_FIELD = "grouping.equal_sizes"
FUSING = ("lagrangian", "hard_concrete")  # relaxations at whose end heads are fused


def broken_rules(record: Mapping[str, Any]) -> list[str]:
    """Reasons why the choices of `record` (fields of a recipe) do not go together.

    Empty if they do.

    The record may be partial: a rule applies once all fields that it reads are there.
    """
    reasons = (
        rule(*(record[name] for name in names))
        for names, rule in RULES
        if all(n in record for n in names)
    )
    return [reason for reason in reasons if reason]


def refused_by_family(record: Mapping[str, Any], geometry: HeadGeometry) -> list[str]:
    """Reasons why a checkpoint's family has no form for the choices of `record`, not all of them.

    Empty if it has.
    """
    reasons: list[str] = []
    if record.get("objective") == "layer" and geometry.head_norms:
        reasons.append(
            f"objective=layer has no form for {geometry.family}, whose norm of queries and keys "
            "has weights of each head's own; use another objective, such as least_squares or model"
        )
    if record.get("composition", "none") != "none" and geometry.window:
        reasons.append(
            f"composition={record['composition']} has no form for layers with a sliding window, "
            f"as this {geometry.family} has"
        )
    groups = dict(record.get("settings", ())).get("composition.groups", 1)
    if geometry.num_heads % groups:
        reasons.append(
            f"composition.groups must divide the {geometry.num_heads} query heads, got {groups}"
        )
    width = record.get("width", 1)
    if geometry.value_norm and isinstance(width, int) and width > 1:
        reasons.append(
            f"width={width} has no form for {geometry.family}, whose values pass a norm "
            "after their projection; leave width at 1"
        )
    return reasons


def used(axis: str, chosen: Mapping[str, Any]) -> bool:
    """Whether the chosen grouping (and objective) make use of an objective, or of a similarity."""
    parts = [GROUPING.get(chosen["grouping"])]
    if axis == "similarity" and chosen["objective"] is not None:
        parts.append(OBJECTIVE.get(chosen["objective"]))
    return any(axis in part.needs for part in parts)


def makes_equal_groups(grouping: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a grouping makes groups of one size with these settings.

    Args:
        settings: By "axis.knob"; others are at their defaults.
    """
    part = GROUPING.get(grouping)
    if "equal_groups" in part.needs:
        return True
    name = EQUAL_SIZES_FIELD.partition(".")[2]
    knob = next((knob for knob in part.knobs if knob.name == name), None)
    # Without that knob the settings of other groupings have no effect
    return knob is not None and bool(settings.get(EQUAL_SIZES_FIELD, knob.default))


def _objective_unused(grouping: str, objective: str | None) -> str | None:
    needed = used("objective", {"grouping": grouping})
    if needed and objective is None:
        return f"grouping={grouping} needs an objective, one of {OBJECTIVE.names()}"
    if not needed and objective is not None:
        return f"grouping={grouping} scores nothing; objective must be left out, got {objective!r}"
    return None


def _not_additive(grouping: str, objective: str | None) -> str | None:
    needs_cost = "group_cost" in GROUPING.get(grouping).needs
    if needs_cost and objective is not None and "whole_partition" in OBJECTIVE.get(objective).needs:
        return (
            f"grouping={grouping} needs an additive group cost; objective={objective} scores "
            f"whole partitions"
        )
    return None


def _similarity_unused(grouping: str, objective: str | None, similarity: str | None) -> str | None:
    needed = used("similarity", {"grouping": grouping, "objective": objective})
    if needed and similarity is None:
        return (
            f"grouping={grouping} with objective={objective} needs a similarity, one of "
            f"{SIMILARITY.names()}"
        )
    if not needed and similarity is not None:
        return (
            f"grouping={grouping} with objective={objective} uses no similarity; leave it "
            f"out, got {similarity!r}"
        )
    return None


def _no_cost_for_allocation(objective: str | None, allocation: str) -> str | None:
    if "group_cost" not in ALLOCATION.get(allocation).needs:
        return None
    if objective is None or "whole_partition" in OBJECTIVE.get(objective).needs:
        return (
            f"allocation={allocation} needs an objective with a group cost, got "
            f"objective={objective}"
        )
    return None


def _split_counts(together: bool, allocation: str) -> str | None:
    if together and "apart" in ALLOCATION.get(allocation).needs:
        return (
            f"allocation={allocation} gives keys and values different counts; set together to false"
        )
    return None


def _only_with(axis: str, parts: tuple[str, ...], why: str, choice: str, plain: str) -> Rule:
    """Return the rule that these parts of an axis need `choice` = `plain`.

    Args:
        why: The reason that the message gives for such a part.
    """

    def rule(part: str, chosen: str) -> str | None:
        if part in parts and chosen != plain:
            return f"{axis}={part} {why}, so {choice} must be {plain}, got {choice}={chosen}"
        return None

    return (axis, choice), rule


def _shared_and(choice: str, plain: str) -> Rule:
    shared = tuple(name for name in SHARING.names() if name != "none")
    return _only_with("sharing", shared, "needs all heads as they are", choice, plain)


def _fusing_and(choice: str, plain: str) -> Rule:
    return _only_with("relaxation", FUSING, "fuses heads itself", choice, plain)


def sharing_saves_no_cache(sharing: str, kv_ratio: float | Fraction) -> str | None:
    """Why a shared head cannot also meet a smaller KV budget, or None."""
    if sharing != "none" and kv_ratio != 1:
        return (
            f"sharing={sharing} saves weights and no KV cache, so kv_ratio must be 1, got "
            f"{float(kv_ratio):g}; "
            "shared heads together with grouped ones are not supported"
        )
    return None


def _drawn_together(sharing: str, relaxation: str) -> str | None:
    if (sharing == "post") != (relaxation == "pull_together"):
        return (
            f"sharing=post and relaxation=pull_together go together, got sharing={sharing} "
            f"and relaxation={relaxation}"
        )
    return None


def nothing_to_fuse(relaxation: str, kv_ratio: float | Fraction) -> str | None:
    """Why a relaxation that fuses has nothing to do at the full cache, or None."""
    if relaxation in FUSING and kv_ratio == 1:
        return f"relaxation={relaxation} fuses heads, and at kv_ratio 1 there are none to fuse"
    return None


def keeps_everything(sharing: str, composition: str, kv_ratio: float | Fraction) -> str | None:
    """Why a conversion at this ratio would leave the checkpoint as it is, or None."""
    if kv_ratio == 1 and sharing == "none" and composition == "none":
        return (
            "kv_ratio 1 keeps the whole cache of the checkpoint and changes nothing; give "
            "less than 1, e.g. 0.5"
        )
    return None


def _wide(width: int | str, fusion: str) -> str | None:
    if width != 1 and fusion != "least_squares":
        return f"heads of width {width} are made by fusion=least_squares alone, got fusion={fusion}"
    return None


def _wide_counts(width: int | str, allocation: str) -> str | None:
    if width == 1:
        return None
    if allocation != "uniform" and not isinstance(width, int):
        return (
            f"width={width} is for allocation=uniform, where every layer has one count; give "
            f"allocation={allocation} a number"
        )
    if allocation not in ("uniform", "layerwise", "knapsack"):
        return f"allocation={allocation} counts heads of the checkpoint's width; got width {width}"
    return None


def _wide_increases(
    width: int | str, allocation: str, settings: Iterable[tuple[str, Any]]
) -> str | None:
    measured = dict(settings).get("allocation.increases") == "measured"
    if width != 1 and allocation in ("layerwise", "knapsack") and measured:
        return f"loss increases of heads of width {width} are estimated, not measured"
    return None


def _wide_composition(width: int | str, composition: str) -> str | None:
    if width != 1 and composition != "none":
        return f"composition={composition} composes heads of the checkpoint's width, got {width}"
    return None


def _no_stages(relaxation: str, settings: Iterable[tuple[str, Any]]) -> str | None:
    values = dict(settings)
    steps = values.get("relaxation.regroup_steps")
    if steps and not values.get("relaxation.halving"):
        return (
            f"relaxation.regroup_steps={steps} is for a fusion in stages: set relaxation.halving, "
            "or leave it out"
        )
    return None


def _does_not_cool(grouping: str, settings: Iterable[tuple[str, Any]]) -> str | None:
    if grouping != "anneal":
        return None
    defaults = {f"grouping.{knob.name}": knob.default for knob in GROUPING.get(grouping).knobs}
    values = {**defaults, **dict(settings)}
    start = values["grouping.start_temperature"]
    end = values["grouping.end_temperature"]
    if start > end:
        return None
    return (
        "grouping.start_temperature must be more than grouping.end_temperature, got "
        f"{start:g} and {end:g}"
    )


def _composes_nothing(composition: str, settings: Iterable[tuple[str, Any]]) -> str | None:
    if composition == "none":
        return None
    chosen = {name.removeprefix("composition."): value for name, value in dict(settings).items()}
    known = {field.name for field in fields(Composition)}
    try:
        Composition(**{name: value for name, value in chosen.items() if name in known})
    except PlanError as error:
        return str(error)
    return None


RULES: tuple[Rule, ...] = (
    (("grouping", "settings"), _does_not_cool),
    (("composition", "settings"), _composes_nothing),
    (("relaxation", "settings"), _no_stages),
    (("width", "fusion"), _wide),
    (("width", "allocation"), _wide_counts),
    (("width", "allocation", "settings"), _wide_increases),
    (("width", "composition"), _wide_composition),
    (("relaxation", "kv_ratio"), nothing_to_fuse),
    (("sharing", "relaxation"), _drawn_together),
    _fusing_and("fusion", "mean"),
    _fusing_and("sharing", "none"),
    _fusing_and("refinement", "none"),
    _fusing_and("composition", "none"),
    _shared_and("composition", "none"),
    _shared_and("recovery", "full"),
    _only_with("composition", ("dcmha",), "has new weights to train", "recovery", "full"),
    (("sharing", "kv_ratio"), sharing_saves_no_cache),
    _shared_and("fusion", "mean"),
    _shared_and("alignment", "none"),
    _shared_and("grouping", "neighbour"),
    _shared_and("allocation", "uniform"),
    _shared_and("refinement", "none"),
    _only_with(
        "fusion",
        ("least_squares",),
        "finds its own maps, to align is pointless",
        "alignment",
        "none",
    ),
    (("grouping", "objective"), _objective_unused),
    (("grouping", "objective"), _not_additive),
    (("grouping", "objective", "similarity"), _similarity_unused),
    (("objective", "allocation"), _no_cost_for_allocation),
    (("together", "allocation"), _split_counts),
)
