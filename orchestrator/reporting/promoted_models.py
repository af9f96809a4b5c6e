"""The models that a search has promoted, best first: what the last lines on the terminal, `--json` and the report say
of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attention.ratios import percent
from orchestrator.reporting.serve_commands import ways_to_serve

PROMOTED = "promoted"
LIBRARY = "transformers"  # told on the terminal where no server holds the model
Model = dict[str, Any]


def promoted_models(promotion: Mapping[str, Any]) -> list[Model]:
    """Of each candidate of `promotion.json` that was promoted: trial_id, recipe, label (the recipe as it is shown),
    kv_ratio, loss, loss_increase (nats a token), perplexity, kv_bytes_per_token, `path` of the checkpoint, `version` in
    the registry, and `serve` (`serve_commands.ways_to_serve`). The smallest cache first, among equals the lowest
    loss."""
    done = [c for c in promotion.get("candidates", {}).values() if c.get("status") == PROMOTED]
    return [_model(c) for c in sorted(done, key=_rank)]


def _rank(candidate: Mapping[str, Any]) -> tuple[float, float]:
    loss = candidate.get("loss")
    return candidate["kv_ratio"], math.inf if loss is None else loss


def _model(candidate: Mapping[str, Any]) -> Model:
    loss, original = candidate.get("loss"), candidate.get("original_loss")
    path = candidate.get("model")
    return {
        "label": candidate.get("label") or candidate["recipe"],
        **{name: candidate.get(name) for name in ("trial_id", "recipe", "kv_ratio", "kv_bytes_per_token", "version")},
        "loss": loss,
        "loss_increase": None if loss is None or original is None else loss - original,
        "perplexity": None if loss is None else math.exp(loss),
        "path": path,
        "serve": ways_to_serve(path, candidate.get("served")) if path else [],
    }


def lines_of(models: Sequence[Model]) -> list[str]:
    """Where each model lies and what serves it, as plain lines whose commands can be copied."""
    lines = []
    for model in models:
        increase = "" if model["loss_increase"] is None else f", loss {model['loss_increase']:+.3f}"
        lines.append(f"promoted {model['path']}")
        lines.append(f"         {model['label']}, {percent(model['kv_ratio'])} of the checkpoint's KV{increase}")
        served = [way for way in model["serve"] if "commands" in way]
        servers = [way for way in served if way["engine"] != LIBRARY]
        for way in servers or served:
            lines += [f"{way['engine'] if not i else '':>12}  {line}" for i, line in enumerate(way["commands"])]
    return lines
