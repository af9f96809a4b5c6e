"""`headfold evaluate`: what a checkpoint is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attention.checkpoint import Checkpoint
from attention.io import checkpoint
from attention.io.precision import cast_weights, round_weights
from attention.io.sources import check_source, source_name
from attention.modeling.modeling import plan_of
from attention.progress import clock
from orchestrator import checkpoints
from orchestrator.conversion import loading
from orchestrator.conversion.estimates.sizes import Size
from orchestrator.conversion.estimates.work import matmul_rate
from orchestrator.evaluation.extras import NOTHING_MORE, Extras, PreparedExtras
from orchestrator.evaluation.long_context import TEXTS
from orchestrator.storage.records import compact
from trainers.evaluation import decode_speed, evaluate, perplexity
from trainers.text.data import LoadedTexts, Texts


def evaluate_checkpoint(
    path: str | Path,
    original: str | Path | None = None,
    *,
    baseline: str | Path | None = None,
    extras: Extras = NOTHING_MORE,
    data: str | None = None,
    eval_data: str | None = None,
    text_field: str = "text",
    eval_tokens: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    dtype: str = checkpoints.AUTO,
    device: str = "auto",
    speed_tokens: int = 32,
) -> dict[str, Any]:
    """Held-out loss (nats per token), increase and KL against `original` if given, KV bytes planned and held, tokens a
    second.

    `data`: a text whose held-out part is measured on, as `convert` does where it is given this text alone; `eval_data`:
    one that is measured on whole, less what also stands in `data` (see `trainers.text.data.Texts`).
    `baseline`: one more checkpoint, whose loss is measured too. `extras`, where asked for, are of all three.
    `kv_ratio` is of the original's cache; without one, of the cache that `kv_ratio_of` names.
    `dtype`: what the cache is held in, and what decodes for the speed (auto: the checkpoint's own); losses are computed
    as `checkpoints.working_dtype` says. Raises ConfigError or DataError for what a user can mend.
    """
    for key, source in (("checkpoint", path), ("original", original), ("baseline", baseline)):
        if source is not None:
            check_source(source, key)
    phases = loading.Phases()
    recipe = checkpoint.note_of(path).get("recipe")
    with phases("data"):
        texts = Texts(data, eval_data, text_field, seed)
        cut = {"eval_tokens": eval_tokens, "sequence_length": sequence_length}
        dtype, loaded, prepared = _prepare(path, original, baseline, extras, texts, dtype=dtype, **cut)
        sequences = loaded.held_out
    with phases("load"):
        model = checkpoints.load_working(path, dtype, device)
        teacher = checkpoints.load_working(original, dtype, device) if original is not None else None
    with phases("evaluate"):
        round_weights(model, checkpoints.dtype_of(dtype))
        scored = evaluate(model, sequences, teacher=teacher)
        original_worth = evaluate(teacher, sequences) if teacher is not None else None
        beside: dict[str, Any] = {"loss_increase": None, "perplexity": perplexity(scored.loss)}
        if original_worth is not None:
            beside = scored.compared(original_worth)
    with phases("extras"):
        measured = {"checkpoint": prepared.of(model)} | ({} if teacher is None else {"original": prepared.of(teacher)})
    baseline_loss = None
    if baseline is not None:
        with phases("baseline"):
            other = checkpoints.load_working(baseline, dtype, device)
            baseline_worth = evaluate(other, sequences)
            baseline_loss = baseline_worth.loss
            if original_worth is not None:
                increase = baseline_worth.compared(original_worth)
                beside |= {f"baseline_{name}": increase[name] for name in ("loss_increase", "loss_increase_stderr")}
            measured["baseline"] = prepared.of(other)
            del other
    heads, kind = _reference_cache(path, model, teacher)
    cast_weights(model, checkpoints.dtype_of(dtype))
    record = {
        "checkpoint": source_name(path),
        "original": None if original is None else source_name(original),
        "loss": scored.loss,
        "original_loss": None if original_worth is None else original_worth.loss,
        **beside,
        **loaded.facts,
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
        **checkpoints.cache_facts(model, heads),
    }
    if speed_tokens:
        with phases("speed"):
            length = sequences.shape[1]
            prompt = sequences[:1, : max(1, length - speed_tokens)]
            speed = decode_speed(model, prompt, min(speed_tokens, length - 1))
        record |= {"prefill_tokens_per_second": speed.prefill, "decode_tokens_per_second": speed.decode}
    return record | prepared.record(measured) | {"seconds": dict(phases)}


def _prepare(
    path: str | Path,
    original: str | Path | None,
    baseline: str | Path | None,
    extras: Extras,
    texts: Texts,
    *,
    eval_tokens: int | None,
    sequence_length: int | None,
    dtype: str,
) -> tuple[str, LoadedTexts, PreparedExtras]:
    """All that is checked and made before a model is loaded: the name of the dtype, the held-out text, and what else is
    measured."""
    positions = _common_positions(sequence_length, path, original=original, baseline=baseline)
    dtype = checkpoints.written_dtype(path, dtype)
    tokenizer = checkpoints.load_tokenizer(original if original is not None else path)

    _check_same_tokens(tokenizer, path, original=original, baseline=baseline)

    def held_out(length: int) -> Tensor:
        wanted: dict[str, Any] = {"eval_tokens": TEXTS * length, "sequence_length": length}
        return texts.load(tokenizer, positions, calibrate=False, **wanted).held_out

    wanted: dict[str, Any] = {"eval_tokens": eval_tokens, "sequence_length": sequence_length}
    loaded = texts.load(tokenizer, positions, calibrate=False, **wanted)
    return dtype, loaded, extras.prepare(tokenizer, positions, held_out, texts.seed)


def _check_same_tokens(tokenizer: Any, path: str | Path, **others: str | Path | None) -> None:
    """Raises ConfigError unless all models were made for the tokens of `tokenizer`, that of the original or else of the
    checkpoint: losses per token of other tokens cannot be compared. A model without one of its own is taken to be."""
    first = "original" if others.get("original") is not None else "checkpoint"
    for key, name in {"checkpoint": path, **others}.items():
        if name is not None and key != first:
            checkpoints.check_same_tokens(tokenizer, name, key, first)


def rehearse_evaluation(
    path: str | Path,
    original: str | Path | None = None,
    *,
    baseline: str | Path | None = None,
    extras: Extras = NOTHING_MORE,
    data: str | None = None,
    eval_data: str | None = None,
    text_field: str = "text",
    seed: int = 0,
    device: str = "auto",
    **given: Any,
) -> dict[str, str]:
    """What `evaluate_checkpoint` would measure and take, in words by what they are about. Texts are read, weights are
    not, and nothing is written. `given`: eval_tokens, sequence_length and dtype of it. Raises as it does."""
    texts = Texts(data, eval_data, text_field, seed)
    dtype, loaded, _ = _prepare(path, original, baseline, extras, texts, **given)
    sequences = loaded.held_out
    works_in, models = checkpoints.dtype_of(checkpoints.working_dtype(dtype, device)), [path, original, baseline]
    sizes = [Size.of(Checkpoint.open(model).config).total for model in models if model is not None]
    held, kind = works_in.itemsize * sum(sizes) / 2**30, str(works_in).removeprefix("torch.")
    operations = 2.0 * sum(sizes) * sequences.numel()
    names = [name for name in ("tasks", "prompts", "context_lengths") if getattr(extras, name)]
    more = f", and {', '.join(names)}" if names else ""
    return {
        "measures": f"held-out loss of {len(sizes)} model(s) on {compact(sequences.numel())} tokens of "
        f"{texts.eval_source} each, in sequences of {sequences.shape[1]}{more}",
        "memory": f"{held:.1f} GiB of weights in {kind}",
        "work": f"{operations:.2g} operations for the losses; about "
        f"{clock(operations / matmul_rate(works_in))} here on the CPU",
    }


def _common_positions(sequence_length: int | None, path: str | Path, **others: str | Path | None) -> int:
    """Positions that all models take. Raises ConfigError for one with another vocabulary, or too few for a sequence."""
    opened = checkpoints.open_checkpoint(path, "checkpoint", sequence_length=sequence_length)
    positions = opened.geometry.max_positions
    for key, name in others.items():
        if name is not None:
            other = checkpoints.open_checkpoint(name, key, sequence_length=sequence_length)
            checkpoints.check_same_words(other, opened, key)
            positions = min(positions, other.geometry.max_positions)
    return positions


def _reference_cache(path: str | Path, model: PreTrainedModel, original: PreTrainedModel | None) -> tuple[int, str]:
    """The KV heads that a KV ratio is a share of, and whose they are, in words."""
    if original is not None:
        return plan_of(original).kv_heads, "the original's cache"
    if (recorded := checkpoint.original_heads(path)) is not None:
        return recorded, "the cache of the model that it was converted from"
    return plan_of(model).kv_heads, "its own cache, as no other is known (give an original to compare with)"
