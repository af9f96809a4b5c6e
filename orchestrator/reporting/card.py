"""The model card of an exported checkpoint: README.md with the hub's metadata in front, and a picture beside it.

What a card says and the folder itself does not know (base, recipe, losses, tasks) is kept in `card.json` beside it, so
that what is exported from this folder can say it too. It names no path of the machine that it was made on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import jinja2
import yaml

from attention.checkpoint import Checkpoint
from attention.io import checkpoint
from attention.io.files import write_whole
from attention.io.stock_form import format_of
from attention.plan import AttentionPlan
from attention.plan_parts import LayerPlan
from attention.ratios import percent, ratio_of
from orchestrator.checkpoints import BASE_FIELDS
from orchestrator.reporting.card_loading import loading_lines
from orchestrator.reporting.evaluation_tables import tasks_table
from orchestrator.reporting.figures.drawing import save_png
from orchestrator.reporting.figures.search import budgets_figure
from orchestrator.reporting.tables import Table
from orchestrator.storage.json_files import read_json, write_json

CARD, FACTS, PICTURE = "README.md", "card.json", "kv_heads.png"
EXPORT = "export.json"
TAGS = ("headfold", "kv-cache", "grouped-query-attention")
ENGINES = ("engine", "KV bytes/token promised", "reported", "same tokens", "log-probabilities", "tokens that fit")
_environment = jinja2.Environment(
    loader=jinja2.PackageLoader("orchestrator.reporting", "."), trim_blocks=True, lstrip_blocks=True
)


@dataclass(frozen=True)
class CardFacts:
    """What is known of a model. `base`: its name; `base_id`: on the hub; `losses`: held out, nats a token, by what they
    are of; `tasks`: scores by model, as `evaluate --tasks` gives them; `trained`: steps and tokens behind the weights,
    and what text they are of; `datasets`: that text, if it is on the hub."""

    base: str | None = None
    base_id: str | None = None
    license: str | None = None
    recipe: str | None = None
    kv_ratio: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    tasks: dict[str, Any] = field(default_factory=dict)
    trained: dict[str, Any] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: str | Path) -> CardFacts:
        """What a checkpoint says of itself: its `card.json`, else what its conversion has noted."""
        file = Path(folder) / FACTS
        if file.is_file():
            record = read_json(file)
            return cls(**{f.name: record[f.name] for f in fields(cls) if f.name in record})
        note = checkpoint.note_of(folder)
        recipe: dict[str, Any] = note.get("recipe") or {}
        original: dict[str, Any] = note.get(checkpoint.ORIGINAL) or {}
        own = original.get("key_and_value_heads")
        ratio = ratio_of(AttentionPlan.from_dict(note["plan"]), own) if own and "plan" in note else None
        named: dict[str, Any] = {key: original.get(key) for key in BASE_FIELDS}
        return cls(recipe=recipe.get("name"), kv_ratio=ratio, **named)


def write_card(folder: str | Path, facts: CardFacts, repository: str | None = None) -> Path:
    """Write card, picture and facts into the folder of a checkpoint, whose digests are to be written anew after it.

    `repository`: on the hub, where it will lie; None: lines for loading name the folder.
    """
    folder = Path(folder)
    if plans := _plans(folder):
        save_png(budgets_figure(plans), folder / PICTURE)
    write_json(folder / FACTS, asdict(facts))
    write_whole(folder / CARD, card_of(folder, facts, repository))
    return folder / CARD


def _plans(folder: Path) -> dict[str, AttentionPlan]:
    """What each layer keeps, and below it what each had, where the conversion has noted that."""
    note = checkpoint.note_of(folder)
    if "plan" not in note:
        return {}
    plan = AttentionPlan.from_dict(note["plan"])
    had = (checkpoint.original_heads(folder) or 0) // (2 * plan.num_layers)
    if not had or plan.num_heads % had:
        return {"this model": plan}
    groups = tuple(head * had // plan.num_heads for head in range(plan.num_heads))
    original = AttentionPlan((LayerPlan(groups, groups),) * plan.num_layers, plan.head_dim)
    return {"this model": plan, "original": original}


def card_of(folder: Path, facts: CardFacts, repository: str | None = None) -> str:
    """The text of a card."""
    export = read_json(folder / EXPORT) if (folder / EXPORT).is_file() else {}
    engines = _engines(folder, export)
    base = facts.base or "its base"
    share = "a smaller" if facts.kv_ratio is None else f"{percent(facts.kv_ratio)} of its"
    tables = [_cache(export, facts), _losses(facts), _tasks(facts), _training(facts), engine_checks(export)]
    body = _environment.get_template("card.md").render(
        title=repository.rpartition("/")[2] if repository else f"{facts.base or 'A model'} at {share} KV cache",
        what=_what(facts, base, share),
        layers=(folder / PICTURE).is_file(),
        picture=PICTURE,
        tables=[table for table in tables if table.rows],
        loading=loading_lines(folder, repository, engines),
        licence=_licence(facts, base),
    )
    front = yaml.safe_dump(_metadata(folder, facts, engines), sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n{body}\n"


def _engines(folder: Path, export: Mapping[str, Any]) -> list[str]:
    """Software that loads the folder."""
    if export.get("engines"):
        return list(export["engines"])
    if any(folder.glob("*.gguf")):
        return ["llama.cpp"]
    try:
        return format_of(opened := Checkpoint.open(folder), opened.config.dtype or "float32")["loads_in"]
    except ValueError:
        return []


def _metadata(folder: Path, facts: CardFacts, engines: Sequence[str]) -> dict[str, Any]:
    library = "gguf" if any(folder.glob("*.gguf")) else "transformers" if "transformers" in engines else None
    record = {
        "base_model": facts.base_id,
        "base_model_relation": "finetune" if facts.base_id else None,
        "license": facts.license,
        "library_name": library,
        "pipeline_tag": "text-generation",
        "datasets": facts.datasets,
        "tags": list(TAGS),
    }
    return {key: value for key, value in record.items() if value}


def _what(facts: CardFacts, base: str, share: str) -> str:
    linked = f"[{base}](https://huggingface.co/{facts.base_id})" if facts.base_id else base
    recipe = f", by recipe `{facts.recipe}`" if facts.recipe else ""
    converted = f"{linked}, converted to {share} KV cache{recipe} with Headfold"
    return f"{converted}: groups of attention heads share keys and values."


def _licence(facts: CardFacts, base: str) -> str:
    if facts.license:
        return f"That of {base}: {facts.license}."
    return f"That of {base}, which is not recorded here: look it up, and fill in `license` above, before publishing."


def _cache(export: Mapping[str, Any], facts: CardFacts) -> Table:
    after, before = export.get("kv_bytes_per_token_after"), export.get("kv_bytes_per_token_original")
    rows = [("this model", f"{after:,}")] if after else []
    rows += [(f"{facts.base or 'base'}", f"{before:,}")] if after and before else []
    dtype = export.get("cache_dtype") or export.get("dtype")
    return Table(("KV cache", f"bytes per token in {dtype}"), rows, intro="KV cache")


def _losses(facts: CardFacts) -> Table:
    rows = [(name, f"{loss:.3f}") for name, loss in facts.losses.items()]
    return Table(("model", "held-out loss, nats per token"), rows, intro="Losses")


def _tasks(facts: CardFacts) -> Table:
    if not facts.tasks:
        return Table((), [])
    table = tasks_table(facts.tasks)
    named = ["this model" if name == "checkpoint" else name for name in table.columns]
    return Table(named, table.rows, intro="Tasks", notes=["By lm-evaluation-harness; ± is the standard error."])


def _training(facts: CardFacts) -> Table:
    shown = {"steps": "steps", "tokens": "tokens", "data": "text"}
    rows = [
        (shown[key], f"{value:,}" if isinstance(value, int) else str(value))
        for key, value in facts.trained.items()
        if key in shown and value is not None
    ]
    return Table(("trained for", ""), rows, intro="Training")


def engine_checks(export: Mapping[str, Any]) -> Table:
    """What an engine that has loaded the export has shown (`check` in export.json)."""
    check: dict[str, Any] = export.get("check") or {"runs": ()}
    rows = [
        (
            check["version"],
            _number(check["kv_bytes_per_token_promised"]),
            f"{check['kv_bytes_per_token']:,g}",
            f"{run['same']} of {run['prompts']} prompts, {run['how']}",
            f"within {run['difference']:.2g}",
            f"{check['capacity']:,} in {check['memory'] / 2**30:g} GiB of {check['cache_dtype']}",
        )
        for run in check["runs"]
    ]
    return Table(ENGINES, rows, intro="Checked in engines")


def _number(value: Any) -> str:
    return "" if value is None else f"{value:,}"
