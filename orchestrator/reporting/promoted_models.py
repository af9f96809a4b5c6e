"""The models that a search has promoted, and the engines and commands that serve them.

The last lines on the terminal, the JSON of a search and its report show these.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from attention.base.messages import cut
from attention.checkpoint import Checkpoint
from attention.io.export import LargerCacheError, cache_dtype, check_cache
from attention.io.stock_form import format_of
from attention.io.targets import TargetError, target, vllm
from attention.ratios import percent
from orchestrator.storage.cache_points import PROMOTED_ROLE, CachePoint
from orchestrator.storage.json_files import read_json

PROMOTED = "promoted"
_UNROUNDED = ("f16", "bf16")
_TRANSFORMERS = "transformers"
_TARGETS = {"vLLM": "vllm", "llama.cpp": "gguf", _TRANSFORMERS: "transformers"}
"""Engines, and the export target that each needs if it does not load the folder itself."""


class EngineService(TypedDict):
    """How an engine serves a model, or why it cannot at the model's own cache size."""

    engine: str
    target: NotRequired[str | None]
    """Target of the required export; None if it loads the folder as it is."""
    commands: NotRequired[list[str]]
    """For transformers: the line of Python that loads it."""
    kv_bytes_per_token: NotRequired[int]
    why_not: NotRequired[str]


class PromotedModel(TypedDict):
    """A promoted model. Losses are in nats per token."""

    label: str
    """Displayed name of the recipe."""
    trial_id: str
    recipe: str
    kv_ratio: float
    """As requested."""
    used_kv_ratio: float | None
    """What it has, where the promotion has recorded it."""
    kv_bytes_per_token: int | None
    version: str | None
    """Version in the registry."""
    loss: float | None
    loss_increase: float | None
    loss_increase_stderr: float | None
    """Standard error over held-out sequences, with a 16-bit cache; None if not measured."""
    perplexity: float | None
    path: str | None
    """Path of the checkpoint."""
    serve: list[EngineService]


def promoted_models(
    promotion: Mapping[str, Any], caches: Sequence[CachePoint] = ()
) -> list[PromotedModel]:
    """Return the promoted candidates of `promotion.json`.

    The smallest cache comes first, among equals the lowest loss.

    Args:
        promotion: The content of the file.
        caches: Measurements of the search in cache formats, for the standard errors.
    """
    candidates = promotion.get("candidates", {}).values()
    promoted = [c for c in candidates if c.get("status") == PROMOTED]
    stderr = {
        point["trial_id"]: point["loss_increase_stderr"]
        for point in caches
        if point["role"] == PROMOTED_ROLE and point["cache_format"] in _UNROUNDED
    }
    return [
        _model(candidate, stderr.get(candidate["trial_id"]))
        for candidate in sorted(promoted, key=_rank)
    ]


def _rank(candidate: Mapping[str, Any]) -> tuple[float, float]:
    loss = candidate.get("loss")
    return candidate["kv_ratio"], math.inf if loss is None else loss


def _model(candidate: Mapping[str, Any], stderr: float | None) -> PromotedModel:
    loss = candidate.get("loss")
    original = candidate.get("original_loss")
    path = candidate.get("model")
    return {
        "label": candidate.get("label") or candidate["recipe"],
        "trial_id": candidate["trial_id"],
        "recipe": candidate["recipe"],
        "kv_ratio": candidate["kv_ratio"],
        "used_kv_ratio": candidate.get("used_kv_ratio"),
        "kv_bytes_per_token": candidate.get("kv_bytes_per_token"),
        "version": candidate.get("version"),
        "loss": loss,
        "loss_increase": None if loss is None or original is None else loss - original,
        "loss_increase_stderr": stderr,
        "perplexity": None if loss is None else math.exp(loss),
        "path": path,
        "serve": engine_services(path, candidate.get("served")) if path else [],
    }


def best_lines(models: Sequence[PromotedModel]) -> list[str]:
    """Return the best model of each size with its path, and one command that serves a model."""
    best = {model["kv_ratio"]: model for model in reversed(models)}
    lines = []
    for model in sorted(best.values(), key=_rank):
        loss = ""
        if (increase := model["loss_increase"]) is not None:
            error = model["loss_increase_stderr"]
            loss = f", loss {increase:+z.3f}" + ("" if error is None else f" ± {error:.3f}")
        ratio = model["used_kv_ratio"] or model["kv_ratio"]
        share = f"{percent(ratio)} of the KV cache"
        lines.append(
            f"promoted {model['path'] or model['trial_id']}  ({share}{loss}, {model['label']})"
        )
    if (service := best_service(models)) is not None:
        name = "load" if service[0] == _TRANSFORMERS else "serve"
        lines.append(f"{name:9}{service[1]}")
    return lines


def best_service(models: Sequence[PromotedModel]) -> tuple[str, str] | None:
    """Return an engine and the one line that serves a promoted model in it; None without any."""
    services = [
        (service["engine"], service["commands"])
        for model in models
        for service in model["serve"]
        if service.get("commands") and "commands" in service
    ]
    # Engines come before transformers, whose command is Python code; then the fewest commands
    services.sort(key=lambda pair: (pair[0] == _TRANSFORMERS, len(pair[1])))
    return (services[0][0], " && ".join(services[0][1])) if services else None


def engine_services(model: str | Path, served: str | Path | None = None) -> list[EngineService]:
    """Return how each engine serves a promoted model. Reads no weights.

    Args:
        model: Folder that the gate of a promotion has written.
        served: The same model, exported for the engine of the search.

    Returns:
        An entry for each engine; none if the folder is no longer there.
    """
    model = Path(model)
    if not (model / "config.json").is_file():
        return []
    opened = Checkpoint.open(model)
    dtype = cache_dtype(str(opened.stored_dtype).removeprefix("torch."))
    stock_engines = format_of(model, dtype)["loads_in"]
    export = _export_of(served)
    services: list[EngineService] = []
    for engine, name in _TARGETS.items():
        exported = export is not None and export[0] == engine
        folder = export[1] if export is not None and exported else model
        # llama.cpp reads its own files only
        stock = not exported and engine in stock_engines and engine != "llama.cpp"
        ready = exported or stock
        try:
            chosen = target("gqa" if stock and engine == _TRANSFORMERS else name)
            support = chosen.support_for(opened.config, opened.plan)
            check_cache(opened.plan, support, name, dtype)
        except (TargetError, LargerCacheError) as error:
            services.append({"engine": engine, "why_not": cut(str(error))})
            continue
        commands = []
        if not ready:
            folder = model.parent / name
            paths = f"{_quoted(model)} --target {name} --out {_quoted(folder)}"
            commands.append(f"headfold export {paths}")
        options = ""
        if name == "vllm" and folder != model:
            if vllm.has_own_counts(opened.config, opened.plan):
                options = vllm.TRUSTING
            elif len(set(support.key_heads)) > 1:
                options = vllm.BACKEND
        commands.append(_start_command(engine, folder, options, stock=folder == model))
        services.append(
            {
                "engine": engine,
                "target": None if ready else name,
                "commands": commands,
                "kv_bytes_per_token": support.bytes_per_token(dtype),
            }
        )
    return services


def _export_of(served: str | Path | None) -> tuple[str, Path] | None:
    """Return the engine that a folder was exported for, and the folder."""
    if served is None or not (report := Path(served) / "export.json").is_file():
        return None
    engines = {name: engine for engine, name in _TARGETS.items()}
    name = read_json(report).get("target")
    return (engines[name], Path(served)) if name in engines else None


def _start_command(engine: str, folder: Path, options: str, stock: bool) -> str:
    if engine == "vLLM":
        return f"vllm serve {_quoted(folder)}{options}"
    if engine == "llama.cpp":
        return f"llama-server -m {_quoted(folder / 'model.gguf')}"
    trusted = "" if stock else ", trust_remote_code=True"
    return f'AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto"{trusted})'


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
