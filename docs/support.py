"""The table of supported families in docs/families.md and that of the recipes in README, from what the code answers;
`python docs/reference.py` writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attention.families import families, geometry_of
from attention.geometry import HeadGeometry
from attention.io.layers.windows import stand_alone
from attention.io.targets import TargetError, target
from attention.plan import AttentionPlan, LayerPlan
from search_spaces.recipes.choice import ENGINE_NAMES, choose_recipe
from search_spaces.recipes.recipe import RecipeError

START, END = "<!-- support: written by docs/reference.py -->\n", "<!-- support: end -->"
NAMES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "llama": [("Llama 1 to 3.x", {})],
    "mistral": [("Mistral", {"sliding_window": None})],
    "qwen2": [("Qwen2, 2.5", {})],
    "qwen3": [("Qwen3, tied embeddings", {"tie_word_embeddings": True}), ("Qwen3", {"tie_word_embeddings": False})],
    "qwen3_moe": [("Qwen3-MoE", {"norm_topk_prob": True})],
    "glm4_moe": [
        ("GLM-4.5-Air", {"attention_bias": True, "head_dim": 128}),
        ("GLM-4.5, 4.6", {"attention_bias": True, "head_dim": 128, "use_qk_norm": True}),
    ],
    "minimax_m2": [("MiniMax-M2", {})],
    "mixtral": [("Mixtral", {})],
    "gemma": [("Gemma", {})],
    "gemma2": [("Gemma 2", {})],
    "gemma3_text": [("Gemma 3 text", {})],
    "gemma4_text": [("Gemma 4 text", {})],
    "phi": [("Phi 1 to 2", {})],
    "phi3": [("Phi-3, Phi-4", {})],
    "gpt_oss": [("gpt-oss", {})],
    "granite": [("Granite", {})],
    "smollm3": [("SmolLM3", {})],
    "stablelm": [("StableLM", {}), ("StableLM, `qk_layernorm`", {"qk_layernorm": True})],
    "olmo2": [("OLMo 2", {})],
    "olmoe": [("OLMoE", {})],
    "gpt2": [("GPT-2", {})],
    "gpt_neox": [("GPT-NeoX (Pythia)", {})],
    "opt": [("OPT", {})],
}
"""Usual names of each family, and the settings of its published checkpoints that its class does not default to."""

ENGINES = {"vLLM": ("vllm",), "llama.cpp": ("gguf",), "transformers": ("transformers", "per_layer", "gqa", "phi")}
HEAD = f"| | keys are fused by | one layer at a time | {' | '.join(ENGINES)} |\n|{'---|' * 6}\n"


def plans(geometry: HeadGeometry) -> Iterator[tuple[str, AttentionPlan]]:
    """From the largest support of an engine to the least: its description, and a plan that needs it."""
    heads, layers = geometry.num_heads, geometry.num_layers

    def groups(count: int) -> tuple[int, ...]:
        return tuple(head * count // heads for head in range(heads))

    few, many = groups(heads // 4), groups(heads // 2)
    uneven = (0, *[1] * (heads - 1))
    for said, first, others in (
        ("any plan", LayerPlan(few, many), LayerPlan(many, few)),
        ("per-layer counts", LayerPlan(few, few), LayerPlan(many, many)),
        ("one count", LayerPlan(uneven, uneven), LayerPlan(uneven, uneven)),
        ("one count, equal groups", LayerPlan(few, few), LayerPlan(few, few)),
        ("ungrouped models only", LayerPlan.identity(heads), LayerPlan.identity(heads)),
    ):
        yield said, AttentionPlan((first, *[others] * (layers - 1)), geometry.head_dim)


def engine_support(config: Any, names: tuple[str, ...]) -> str:
    """The most that one of some targets holds of a family's plans in their own bytes."""
    for said, plan in plans(geometry_of(config)):
        for name in names:
            try:
                found = target(name).support_for(config, plan)
            except TargetError:
                continue
            if found.bytes_per_token("float32") == plan.kv_bytes_per_token("float32"):
                return said
    return "no"


def row(config: Any) -> tuple[str, ...]:
    """Describe a family: how keys are fused, whether layer by layer, and what each engine supports."""
    geometry = geometry_of(config)
    layerwise = "yes" if stand_alone(config) else "no"
    keys = _keys(geometry)
    return (keys, layerwise, *(engine_support(config, names) for names in ENGINES.values()))


def _keys(geometry: HeadGeometry) -> str:
    if geometry.keeps_signs:
        return "mean, signs aligned"
    if geometry.whole_norm:
        return "least squares under the norm"
    return "mean" if geometry.qk_norm else "least squares"


def table() -> str:
    """A line for all families of which the same is said. Raises KeyError for a family that has no name here."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for family in sorted(families(), key=list(NAMES).index):
        for name, settings in NAMES[family]:
            rows.setdefault(row(families()[family].config_class(**settings)), []).append(name)
    return HEAD + "".join(f"| {'; '.join(names)} | {' | '.join(cells)} |\n" for cells, names in rows.items())


def recipe_table() -> str:
    """The choices of `--recipe auto --for ENGINE`, one line for all families with the same ones."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for family in sorted(families(), key=list(NAMES).index):
        for name, settings in NAMES[family]:
            config = families()[family].config_class(**settings)
            recipes = tuple(_recipe_for(config, engine) for engine in ENGINE_NAMES)
            if any(recipes):
                rows.setdefault(recipes, []).append(name)
    head = f"| model | {' | '.join(ENGINE_NAMES.values())} |\n|{'---|' * (1 + len(ENGINE_NAMES))}\n"
    return head + "".join(f"| {'; '.join(names)} | {' | '.join(cells)} |\n" for cells, names in rows.items())


def _recipe_for(config: Any, engine: str) -> str:
    try:
        return f"`{choose_recipe(config, geometry_of(config), engine).recipe}`"
    except RecipeError:
        return ""


def with_table(page: str, content: str) -> str:
    """A page with a table as it is today. Raises ValueError for one that has no place for it."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"expected {START.strip()} and {END} on the page")
    return f"{before}{START}\n{content}\n{END}{after}"
