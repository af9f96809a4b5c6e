"""The model card of an exported checkpoint: README.md with the hub's metadata, and a picture.

Facts of a card that are not in the checkpoint (base, recipe, losses, tasks) are stored in
`card.json` next to it, so that an export of this folder has them too. A card contains no path of
the machine that it was made on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
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
from orchestrator.checkpoints import BASE_FIELDS, base_of
from orchestrator.reporting.card_loading import loading_blocks
from orchestrator.reporting.evaluation_tables import tasks_table
from orchestrator.reporting.figures.drawing import save_png
from orchestrator.reporting.figures.search import budgets_figure
from orchestrator.reporting.tables import Table
from orchestrator.storage.json_files import read_if_there, read_json, write_json

CARD = "README.md"
FACTS = "card.json"
PICTURE = "kv_heads.png"
EXPORT = "export.json"
_TAGS = ("headfold", "kv-cache", "grouped-query-attention")
_CHECK_COLUMNS = (
    "engine",
    "KV bytes/token promised",
    "reported",
    "same tokens",
    "log-probabilities",
    "tokens that fit",
)
_TRAINING_ROWS = {"steps": "steps", "tokens": "tokens", "data": "text"}
_environment = jinja2.Environment(
    loader=jinja2.PackageLoader("orchestrator.reporting", "."),
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class CardFacts:
    """The facts of a model card.

    Attributes:
        base: Name of the model that it was made from.
        base_id: Its name on the hub.
        license: Of the base.
        recipe: Name of the recipe.
        kv_ratio: Share of the base's KV cache.
        converted: Whether it has fewer heads than its base, or other ones.
        losses: Held-out losses in nats per token, by name of the model.
        loss_notes: Notes on the text that they are measured on.
        tasks: Scores by model, as `evaluate --tasks` gives them.
        trained: Steps and tokens of the training, and its text.
        datasets: That text, if it is on the hub.
        cache_format: Format of the KV cache in the commands that serve it.
        tensor_parallel: The cache of each GPU, a record of
            `attention.tensor_parallel.RankCache`; the commands that serve it use as many GPUs.
    """

    base: str | None = None
    base_id: str | None = None
    license: str | None = None
    recipe: str | None = None
    kv_ratio: float | None = None
    converted: bool = True
    losses: dict[str, float] = field(default_factory=dict)
    loss_notes: list[str] = field(default_factory=list)
    tasks: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    trained: dict[str, int | str | None] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    cache_format: str | None = None
    tensor_parallel: dict[str, Any] | None = None

    @classmethod
    def of(cls, folder: str | Path, name: str | Path | None = None) -> CardFacts:
        """Read the facts of a checkpoint from `card.json`, else from the note of its conversion.

        Args:
            folder: Of the checkpoint.
            name: What the checkpoint is called, e.g. its name on the hub; None: the folder.
        """
        file = Path(folder) / FACTS
        if file.is_file():
            record = read_json(file)
            return cls(**{f.name: record[f.name] for f in fields(cls) if f.name in record})
        note = checkpoint.note_of(folder)
        original: Mapping[str, Any] = note.get(checkpoint.ORIGINAL) or {}
        ratio = None
        if "plan" in note:
            plan = AttentionPlan.from_dict(note["plan"])
            # A note of wide heads as a larger head dim counts fewer heads for the same bytes
            if heads := checkpoint.original_heads(folder, plan.head_dim):
                ratio = ratio_of(plan, heads)
        base: dict[str, Any] = {key: original.get(key) for key in BASE_FIELDS}
        if not note:
            base |= base_of(name or folder)
        if polished := note.get("polish"):
            steps, tokens = polished["steps"], polished["tokens"]
            base["trained"] = {"steps": steps, "tokens": tokens, "data": "that of the calibration"}
        return cls(
            recipe=(note.get("recipe") or {}).get("name"),
            kv_ratio=ratio,
            converted=bool(note),
            cache_format=note.get("cache_format"),
            **base,
        )


def write_card(
    folder: str | Path,
    facts: CardFacts,
    repository: str | None = None,
    name: str | None = None,
) -> Path:
    """Write card, picture and facts into the folder of a checkpoint.

    The digests of the folder must be written again afterwards.

    Args:
        folder: Of the checkpoint.
        facts: Facts that are not in the folder.
        repository: Its future repository on the hub; None: code that loads it names the folder.
        name: Of the folder once it is in place; None: it is.
    """
    folder = Path(folder)
    if plans := _plans(folder):
        save_png(budgets_figure(plans), folder / PICTURE)
    write_json(folder / FACTS, asdict(facts))
    write_whole(folder / CARD, card_of(folder, facts, repository, name))
    return folder / CARD


def _plans(folder: Path) -> dict[str, AttentionPlan]:
    """Return the plan, and the original's plan, if the conversion recorded them."""
    note = checkpoint.note_of(folder)
    if "plan" not in note:
        return {}
    plan = AttentionPlan.from_dict(note["plan"])
    stored, head_dim = checkpoint.original_shape(folder, plan.head_dim) or (0, plan.head_dim)
    heads, rest = divmod(stored, 2 * plan.num_layers)
    if not heads or rest or plan.num_heads % heads:
        return {"this model": plan}
    groups = tuple(head * heads // plan.num_heads for head in range(plan.num_heads))
    original = replace(plan.unshared, layers=(LayerPlan(groups, groups),) * plan.num_layers)
    original = replace(original, composition=None, head_dim=head_dim)
    return {"this model": plan, "original": original}


def card_of(
    folder: Path, facts: CardFacts, repository: str | None = None, name: str | None = None
) -> str:
    """Return the text of a card. Arguments as those of `write_card`."""
    export = read_if_there(folder / EXPORT)
    engines = _engines(folder, export)
    base = facts.base or "its base"
    share = "a smaller" if facts.kv_ratio is None else f"{percent(facts.kv_ratio)} of its"
    title = facts.base or "A model"
    if facts.converted:
        title += f" at {share} KV cache"
    tables = [
        _cache_table(export, facts),
        _loss_table(facts),
        _tasks_table(facts),
        _training_table(facts),
        engine_checks(export),
    ]
    body = _environment.get_template("card.md").render(
        title=repository.rpartition("/")[2] if repository else title,
        what=_description(facts, base, share),
        layers=(folder / PICTURE).is_file(),
        picture=PICTURE,
        tables=[table for table in tables if table.rows],
        loading=loading_blocks(
            folder,
            repository,
            engines,
            facts.cache_format,
            (facts.tensor_parallel or {}).get("tensor_parallel"),
            name or folder.resolve().name,
        ),
        licence=_licence(facts, base),
    )
    metadata = _metadata(folder, facts, engines)
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{front}---\n\n{body}\n"


def _engines(folder: Path, export: Mapping[str, Any]) -> list[str]:
    """Return the software that loads the folder."""
    if export.get("engines"):
        return list(export["engines"])
    if any(folder.glob("*.gguf")):
        return ["llama.cpp"]
    try:
        opened = Checkpoint.open(folder)
        return format_of(opened, opened.config.dtype or "float32")["loads_in"]
    except ValueError:
        return []


def _metadata(folder: Path, facts: CardFacts, engines: Sequence[str]) -> dict[str, str | list[str]]:
    library = None
    if any(folder.glob("*.gguf")):
        library = "gguf"
    elif "transformers" in engines:
        library = "transformers"
    metadata = {
        "base_model": facts.base_id,
        "base_model_relation": "finetune" if facts.base_id and facts.converted else None,
        "license": facts.license,
        "library_name": library,
        "pipeline_tag": "text-generation",
        "datasets": facts.datasets,
        "tags": list(_TAGS),
    }
    return {key: value for key, value in metadata.items() if value}


def _description(facts: CardFacts, base: str, share: str) -> str:
    linked = f"[{base}](https://huggingface.co/{facts.base_id})" if facts.base_id else base
    if not facts.converted:
        return f"{linked}, exported with Headfold as it is: no heads are converted."
    recipe = f", by recipe `{facts.recipe}`" if facts.recipe else ""
    return (
        f"{linked}, converted to {share} KV cache{recipe} with Headfold: groups of attention heads "
        "share keys and values."
    )


def _licence(facts: CardFacts, base: str) -> str:
    if facts.license:
        return f"That of {base}: {facts.license}."
    return (
        f"That of {base}, which is not recorded here: look it up, and fill in `license` above, "
        "before publishing."
    )


def _cache_table(export: Mapping[str, Any], facts: CardFacts) -> Table:
    after = export.get("kv_bytes_per_token_after")
    before = export.get("kv_bytes_per_token_original")
    rows = []
    if after:
        rows.append(("this model", f"{after:,}"))
        if before:
            rows.append((facts.base or "base", f"{before:,}"))
    notes = []
    if ranks := facts.tensor_parallel:
        each = f"on each of {ranks['tensor_parallel']} GPUs"
        rows.append((f"this model, {each}", f"{ranks['kv_bytes_per_token_per_gpu']:,}"))
        if original := ranks["kv_bytes_per_token_per_gpu_original"]:
            rows.append((f"{facts.base or 'base'}, {each}", f"{original:,}"))
        notes.append(f"With tensor parallelism: {ranks['note']}.")
    dtype = export.get("cache_dtype") or export.get("dtype")
    columns = ("KV cache", f"bytes per token in {dtype}")
    return Table(columns, rows, intro="KV cache", notes=notes)


def _loss_table(facts: CardFacts) -> Table:
    rows = [(name, f"{loss:.3f}") for name, loss in facts.losses.items()]
    columns = ("model", "held-out loss, nats per token")
    return Table(columns, rows, intro="Losses", notes=facts.loss_notes)


def _tasks_table(facts: CardFacts) -> Table:
    if not facts.tasks:
        return Table((), [])
    table = tasks_table(facts.tasks)
    columns = ["this model" if name == "checkpoint" else name for name in table.columns]
    notes = ["By lm-evaluation-harness; ± is the standard error."]
    return Table(columns, table.rows, intro="Tasks", notes=notes)


def _training_table(facts: CardFacts) -> Table:
    rows = [
        (_TRAINING_ROWS[key], f"{value:,}" if isinstance(value, int) else str(value))
        for key, value in facts.trained.items()
        if key in _TRAINING_ROWS and value is not None
    ]
    return Table(("trained for", ""), rows, intro="Training")


def engine_checks(export: Mapping[str, Any]) -> Table:
    """Return the results of engines that loaded the export: `check` in export.json."""
    check: Mapping[str, Any] = export.get("check") or {"runs": ()}
    rows = []
    for run in check["runs"]:
        promised = check["kv_bytes_per_token_promised"]
        rows.append(
            (
                check["version"],
                "" if promised is None else f"{promised:,}",
                f"{check['kv_bytes_per_token']:,g}",
                f"{run['same']} of {run['prompts']} prompts, {run['how']}",
                f"within {run['difference']:.2g}",
                f"{check['capacity']:,} in {check['memory'] / 2**30:g} GiB of "
                f"{check['cache_dtype']}",
            )
        )
    return Table(_CHECK_COLUMNS, rows, intro="Checked in engines")
