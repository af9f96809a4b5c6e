"""`headfold evaluate`: what a checkpoint is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attention.modeling import plan_of
from orchestrator import models
from orchestrator.models import Phases
from trainers.evaluation import decode_speed


def evaluate_checkpoint(
    path: str | Path,
    base: str | Path | None = None,
    *,
    eval_data: str = "stdlib",
    eval_tokens: int = 16_384,
    sequence_length: int = 256,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "auto",
    speed_tokens: int = 32,
) -> dict[str, Any]:
    """Held-out loss (nats a token), rise and KL against `base` if given, KV bytes planned and held, tokens a second.

    Raises ConfigError or DataError for what a user can mend.
    """
    phases = Phases()
    for name in filter(None, (path, base)):
        models.geometry_of(str(name), sequence_length, key="checkpoint")
    tokenizer = models.load_tokenizer(base if base is not None else path)
    with phases("data"):
        sequences = models.texts(eval_data, "eval", tokenizer, eval_tokens, sequence_length, seed)
    with phases("load"):
        model = models.load_model(path, dtype, device)
        teacher = models.load_model(base, dtype, device) if base is not None else None
    with phases("evaluate"):
        scored = models.score(model, sequences, teacher)
        loss_base = models.score(teacher, sequences).loss if teacher is not None else None
    record = {
        "checkpoint": str(path),
        "base": None if base is None else str(base),
        "loss": scored.loss,
        "loss_base": loss_base,
        "rise": None if loss_base is None else scored.loss - loss_base,
        "kl": scored.kl,
        "eval_tokens": scored.tokens,
        "plan": json.loads(plan_of(model).to_json()),
        "plan_digest": plan_of(model).digest,
        "dtype": dtype,
        "seed": seed,
        "recipe": models.record_of(path).get("recipe"),
        **models.cache_facts(model),
    }
    if speed_tokens:
        with phases("speed"):
            prompt = sequences[:1, : max(1, sequence_length - speed_tokens)]
            speed = decode_speed(model, prompt, min(speed_tokens, sequence_length - 1))
        record |= {"prefill_tokens_per_second": speed.prefill, "decode_tokens_per_second": speed.decode}
    return record | {"seconds": dict(phases)}
