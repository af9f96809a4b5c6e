"""Export of a checkpoint to a format that engines load, with a report of what it costs.

The formats are in `attention.io.targets`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.base.messages import one_of
from attention.checkpoint import Checkpoint
from attention.io import checkpoint, targets
from attention.io.precision import DTYPES, round_weights
from attention.io.replacing import check_folder
from attention.io.targets import EngineSupport, Lowered, Target
from attention.io.targets._pairs import widest_layers
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan

REPORT_FILE = "export.json"


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    Bytes are a token's KV cache in `cache_dtype`; logit differences are over random tokens.

    Attributes:
        engines: Software that loads the folder.
        kv_heads: Of each layer, as the engines hold them.
        kv_bytes_per_token_original: Of the model that was converted; None where that was not
            recorded.
        check: What an engine that loaded it has shown, empty if none was requested.
        zero_query_heads: In all layers, and `extra_attention`: their work over that of the model's
            own query heads.
    """

    target: str
    folder: str
    model_type: str
    exact: bool
    notes: tuple[str, ...]
    dtype: str
    cache_dtype: str
    engines: tuple[str, ...]
    kv_heads: tuple[int, ...]
    kv_bytes_per_token_before: int
    kv_bytes_per_token_after: int
    kv_bytes_per_token_original: int | None
    max_logit_difference: float = float("nan")
    max_logit: float = float("nan")
    check: Mapping[str, Any] = field(default_factory=dict)
    zero_query_heads: int = 0
    extra_attention: float = 0.0


class LargerCacheError(ValueError):
    """An export that would take more KV cache than the plan. The message has both numbers."""


def export(
    source: str | Path | Checkpoint,
    target: str,
    out: str | Path,
    tokenizer: Any = None,
    *,
    dtype: torch.dtype | str | None = None,
    allow_larger_cache: bool = False,
    overwrite: bool = False,
    check: Callable[[Path, PreTrainedModel], Mapping[str, Any]] | None = None,
    finish: Callable[[Path], object] | None = None,
) -> ExportReport:
    """Lower the checkpoint at `source` to a target and write it to `out` with `export.json`.

    The folder is put in place in one step. Computed in float32 and rounded once to `dtype`. What
    was written is read back and compared in float32 with the source, whose weights are rounded
    alike.

    Args:
        source: Folder or hub name.
        target: Name of an export target.
        out: The folder to write.
        tokenizer: As in `checkpoint.save`.
        dtype: What the weights are written in; None: the checkpoint's own.
        allow_larger_cache: Whether the export may have a larger KV cache than the checkpoint.
        overwrite: Whether an earlier export at `out` may be replaced.
        check: Called with the folder, not yet in place, and the model that was read back; what it
            returns goes into the report, and if it raises, nothing is written.
        finish: Called with the folder, not yet in place, when all else is in it, to add files.

    Raises:
        OutputError: As `attention.io.replacing.check_folder`; before weights are read, as the next
            two.
        TargetError: If the target cannot represent the plan.
        LargerCacheError: If the cache would be larger, unless that is allowed.
        ValueError: If the target or its dtype is unknown, or if the copy that was read back
            differs.
    """
    chosen = targets.target(target)
    opened = Checkpoint.open(source)
    check_folder(out, overwrite=overwrite, reads=[opened.path])
    config = opened.config
    plan = opened.plan
    written = str(dtype or opened.stored_dtype).removeprefix("torch.")
    if written not in chosen.dtypes:
        raise ValueError(one_of(f"dtype for target {chosen.name}", chosen.dtypes, written))
    support = chosen.support_for(config, plan)
    cached = cache_dtype(written)
    if not allow_larger_cache:
        check_cache(plan, support, chosen.name, cached)
    original = checkpoint.original_heads(opened.folder, plan.head_dim)
    model = checkpoint.load(opened.path, torch.float32, config=config)
    lowered = chosen.lower(model)
    reference = _reference(model, lowered, written)
    report = ExportReport(
        target=chosen.name,
        folder=str(Path(out).absolute()),
        model_type="",
        exact=lowered.exact and written in DTYPES,
        notes=(*lowered.notes, *padding_notes(support, plan)),
        dtype=written,
        cache_dtype=cached,
        engines=chosen.engines_of(config, plan),
        kv_heads=tuple(map(max, support.key_heads, support.value_heads)),
        kv_bytes_per_token_before=plan.kv_bytes_per_token(cached),
        kv_bytes_per_token_after=support.bytes_per_token(cached),
        kv_bytes_per_token_original=None
        if original is None
        else DTYPES[cached].itemsize * (round(original * plan.head_dim) + plan.other_numbers),
        zero_query_heads=support.zero_query_heads(plan),
        extra_attention=support.extra_attention(plan),
    )
    after = plan_of(lowered.model)
    folded = lowered.folded
    stock = [lowered.model]
    # And removed from its list when it is written: neither is in the folder of the copy that is
    # read.
    del model, lowered

    def write(fresh: Path) -> None:
        nonlocal report
        report = _write(fresh, chosen, stock, tokenizer, report, reference, folded, check)
        if original is not None:
            checkpoint.write_note(fresh, after, checkpoint.carried(opened.folder))
        if finish is not None:
            finish(fresh)

    checkpoint.write_atomically(out, write, overwrite=overwrite)
    return report


def _reference(model: PreTrainedModel, lowered: Lowered, dtype: str) -> Tensor:
    """Logits that what is written must have, the source's weights being rounded alike."""
    if lowered.folded:
        # Before the dtype of the checkpoint rounds what was folded.
        check_equal(model, lowered.model)
    elif dtype in DTYPES:
        round_weights(model, DTYPES[dtype])
    return probe(model)


def _write(
    fresh: Path,
    chosen: Target,
    stock: list[PreTrainedModel],
    tokenizer: Any,
    report: ExportReport,
    reference: Tensor,
    folded: bool,
    check: Callable[[Path, PreTrainedModel], Mapping[str, Any]] | None,
) -> ExportReport:
    """Write, read back, compare; returns the report with what was found.

    Raises:
        ValueError: If the logits differ.
    """
    config = stock[0].config
    kind = chosen.write(stock.pop(), fresh, report.dtype, tokenizer)
    back = chosen.read(fresh, config)
    difference = largest_difference(reference, probe(back))
    largest = reference.abs().max().item()
    report = replace(report, model_type=kind, max_logit_difference=difference, max_logit=largest)
    if not math.isfinite(difference):
        raise ValueError(
            f"the exported logits must be finite numbers, and some are not: the source's weights "
            f"contain infinite or undefined numbers, or numbers too large for {report.dtype}; "
            "choose another dtype; nothing was written"
        )
    if report.exact and difference > tolerance(DTYPES[report.dtype], folded) * max(largest, 1.0):
        raise ValueError(
            f"the exported logits differ from the source by {difference:.3g}; nothing was written"
        )
    if check is not None:
        report = replace(report, check=check(fresh, back))
    _write_report(fresh, asdict(report))
    return report


def _write_report(folder: str | Path, record: dict[str, Any]) -> None:
    """Put `export.json` into a folder."""
    (Path(folder) / REPORT_FILE).write_text(
        json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )


def cache_dtype(dtype: str) -> str:
    """Return what an engine keeps its cache in for weights in `dtype`.

    The same, float16 for weights of fewer bits.
    """
    return dtype if dtype in DTYPES else "float16"


def check_cache(plan: AttentionPlan, support: EngineSupport, name: str, dtype: str) -> None:
    """Raise LargerCacheError if a target takes more cache than the plan itself."""
    before = plan.kv_bytes_per_token(dtype)
    after = support.bytes_per_token(dtype)
    if after > before:
        raise LargerCacheError(
            f"target {name} takes {after} KV bytes per token, the plan {before}: "
            f"{widest_layers(plan)}, of which each "
            "takes a KV head there, and a format with one count for all layers has as many in "
            "every layer. Convert "
            "with a recipe of one count for all layers (headfold_gqa, align, gqa), let --target "
            "auto find a format "
            "that holds this plan, or accept the larger cache: --allow-larger-cache (in Python: "
            "allow_larger_cache=True)"
        )


def padding_notes(support: EngineSupport, plan: AttentionPlan) -> tuple[str, ...]:
    """Return a note about query heads of zeros, if there are any."""
    if not (zeros := support.zero_query_heads(plan)):
        return ()
    share = f"{100 * support.extra_attention(plan):.3g} % more work in attention, and no more cache"
    return (f"{zeros} query heads of zeros, over all layers, even out the groups: {share}",)


def tolerance(dtype: torch.dtype, folded: bool = False) -> float:
    """Relative logit difference that rounding alone may cause.

    Tight in float32 and where weights are copied.
    """
    if dtype == torch.float32:
        return 1e-4
    return 32 * torch.finfo(dtype).eps if folded else 1e-3


def check_equal(one: PreTrainedModel, other: PreTrainedModel) -> None:
    """Raise ValueError unless two float32 models agree up to rounding."""
    reference = probe(one)
    difference = largest_difference(reference, probe(other))
    limit = tolerance(torch.float32) * max(reference.abs().max().item(), 1.0)
    if not difference <= limit:  # also of NaN
        raise ValueError(
            f"the lowered model's logits differ from the source by {difference:.3g}; nothing was "
            f"written"
        )


@torch.no_grad()
def probe(model: PreTrainedModel, tokens: int = 48, seed: int = 0) -> Tensor:
    """Logits `[2, tokens, V]` on random tokens, on the CPU.

    The measures that compare two models of one vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (2, tokens), generator=generator)
    return model(ids.to(model.device)).logits.cpu()


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference between two tensors."""
    return (one - other).abs().max().item()
