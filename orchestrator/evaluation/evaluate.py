"""`headfold evaluate`: what a checkpoint is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attention.io import checkpoint
from attention.io.precision import cast_weights, round_weights
from attention.io.sources import check_source, source_name
from attention.modeling.modeling import plan_of
from attention.progress import clock
from orchestrator.conversion import loading
from orchestrator.conversion.estimates.sizes import Size
from orchestrator.conversion.estimates.work import matmul_rate
from orchestrator.evaluation.extras import NOTHING_MORE, Extras, PreparedExtras
from orchestrator.evaluation.long_context import TEXTS
from orchestrator.storage.records import compact
from trainers.evaluation import decode_speed, evaluate
from trainers.text.data import load_sequences


def evaluate_checkpoint(
    path: str | Path,
    original: str | Path | None = None,
    *,
    baseline: str | Path | None = None,
    extras: Extras = NOTHING_MORE,
    eval_data: str = "stdlib",
    eval_tokens: int = 16_384,
    sequence_length: int = 256,
    seed: int = 0,
    dtype: str = loading.AUTO,
    device: str = "auto",
    speed_tokens: int = 32,
) -> dict[str, Any]:
    """Held-out loss (nats per token), increase and KL against `original` if given, KV bytes planned and held, tokens a
    second.

    `baseline`: one more checkpoint, whose loss is measured too. `extras`, where asked for, are of all three.
    `kv_ratio` is of the original's cache; without one, of the cache that `kv_ratio_of` names.
    `dtype`: what the cache is held in, and what decodes for the speed (auto: the checkpoint's own); losses are computed
    as `loading.working_dtype` says. Raises ConfigError or DataError for what a user can mend.
    """
    for key, source in (("checkpoint", path), ("original", original), ("baseline", baseline)):
        if source is not None:
            check_source(source, key)
    phases = loading.Phases()
    recipe = checkpoint.note_of(path).get("recipe")
    with phases("data"):
        cut = {"eval_tokens": eval_tokens, "sequence_length": sequence_length, "seed": seed}
        dtype, sequences, prepared = _prepare(path, original, baseline, extras, eval_data, dtype=dtype, **cut)
    with phases("load"):
        model = loading.load_working(path, dtype, device)
        teacher = loading.load_working(original, dtype, device) if original is not None else None
    with phases("evaluate"):
        round_weights(model, loading.dtype_of(dtype))
        scored = evaluate(model, sequences, teacher=teacher)
        original_loss = evaluate(teacher, sequences).loss if teacher is not None else None
    with phases("extras"):
        measured = {"checkpoint": prepared.of(model)} | ({} if teacher is None else {"original": prepared.of(teacher)})
    baseline_loss = None
    if baseline is not None:
        with phases("baseline"):
            other = loading.load_working(baseline, dtype, device)
            baseline_loss = evaluate(other, sequences).loss
            measured["baseline"] = prepared.of(other)
            del other
    heads, kind = _reference_cache(path, model, teacher)
    cast_weights(model, loading.dtype_of(dtype))
    record = {
        "checkpoint": source_name(path),
        "original": None if original is None else source_name(original),
        "loss": scored.loss,
        "original_loss": original_loss,
        "loss_increase": None if original_loss is None else scored.loss - original_loss,
        "baseline": None if baseline is None else source_name(baseline),
        "baseline_loss": baseline_loss,
        "kl": scored.kl,
        "eval_tokens": scored.tokens,
        **scored.noted,
        "plan": plan_of(model).to_dict(),
        "plan_digest": plan_of(model).digest,
        "dtype": dtype,
        "seed": seed,
        "recipe": recipe,
        "kv_ratio_of": kind,
        **loading.cache_facts(model, heads),
    }
    if speed_tokens:
        with phases("speed"):
            prompt = sequences[:1, : max(1, sequence_length - speed_tokens)]
            speed = decode_speed(model, prompt, min(speed_tokens, sequence_length - 1))
        record |= {"prefill_tokens_per_second": speed.prefill, "decode_tokens_per_second": speed.decode}
    return record | prepared.record(measured) | {"seconds": dict(phases)}


def _prepare(
    path: str | Path,
    original: str | Path | None,
    baseline: str | Path | None,
    extras: Extras,
    eval_data: str,
    *,
    eval_tokens: int,
    sequence_length: int,
    seed: int,
    dtype: str,
) -> tuple[str, Tensor, PreparedExtras]:
    """All that is checked and made before a model is loaded: the name of the dtype, the held-out sequences `[N, T]`,
    and what else is measured."""
    positions = _common_positions(sequence_length, path, original=original, baseline=baseline)
    dtype = loading.written_dtype(path, dtype)
    tokenizer = loading.load_tokenizer(original if original is not None else path)

    def held_out(length: int, tokens: int | None = None) -> Tensor:
        tokens = TEXTS * length if tokens is None else tokens
        return load_sequences(eval_data, tokenizer, split="eval", tokens=tokens, sequence_length=length, seed=seed)

    sequences = held_out(sequence_length, eval_tokens)
    return dtype, sequences, extras.prepare(tokenizer, positions, held_out, seed)


def rehearse_evaluation(
    path: str | Path,
    original: str | Path | None = None,
    *,
    baseline: str | Path | None = None,
    extras: Extras = NOTHING_MORE,
    eval_data: str = "stdlib",
    device: str = "auto",
    **given: Any,
) -> dict[str, str]:
    """What `evaluate_checkpoint` would measure and take, in words by what they are about. Texts are read, weights are
    not, and nothing is written. `given`: eval_tokens, sequence_length, seed and dtype of it. Raises as it does."""
    dtype, sequences, _ = _prepare(path, original, baseline, extras, eval_data, **given)
    works_in, models = loading.dtype_of(loading.working_dtype(dtype, device)), [path, original, baseline]
    sizes = [Size.of(checkpoint.load_config(model)).total for model in models if model is not None]
    held, kind = works_in.itemsize * sum(sizes) / 2**30, str(works_in).removeprefix("torch.")
    operations = 2.0 * sum(sizes) * sequences.numel()
    names = [name for name in ("tasks", "prompts", "context_lengths") if getattr(extras, name)]
    more = f", and {', '.join(names)}" if names else ""
    return {
        "measures": f"held-out loss of {len(sizes)} model(s) on {compact(sequences.numel())} tokens each{more}",
        "memory": f"{held:.1f} GiB of weights in {kind}",
        "work": f"{operations:.2g} operations for the losses; about "
        f"{clock(operations / matmul_rate(works_in))} here on the CPU",
    }


def _common_positions(sequence_length: int, path: str | Path, **others: str | Path | None) -> int:
    """Positions that all models take. Raises ConfigError for one with another vocabulary, or too few for a sequence."""
    geometry = loading.geometry_of(str(path), sequence_length, key="checkpoint")
    positions = geometry.max_positions
    for key, name in others.items():
        if name is not None:
            other = loading.geometry_of(str(name), sequence_length, key=key)
            loading.check_same_words(other, geometry, key, str(name))
            positions = min(positions, other.max_positions)
    return positions


def _reference_cache(path: str | Path, model: PreTrainedModel, original: PreTrainedModel | None) -> tuple[int, str]:
    """The KV heads that a KV ratio is a share of, and whose they are, in words."""
    if original is not None:
        return plan_of(original).kv_heads, "the original's cache"
    if (recorded := checkpoint.original_heads(path)) is not None:
        return recorded, "the cache of the model that it was converted from"
    return plan_of(model).kv_heads, "its own cache, as no other is known (give an original to compare with)"
