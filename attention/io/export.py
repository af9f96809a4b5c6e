"""Lowering a converted checkpoint to a stock format, with a report of what it costs.

One file a target in `attention/io/lowerings`; each is a function `(model) -> Lowered`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attention.axes import Axis
from attention.io import checkpoint
from attention.io.precision import cast_weights, own_dtype, round_weights
from attention.io.replacing import check_folder
from attention.io.stock_form import has_stock_form, stock_bytes
from attention.modeling.modeling import plan_of, plan_of_config
from attention.plan import AttentionPlan

TARGETS = Axis("target", "attention.io.lowerings")
REPORT_FILE = "export.json"


@dataclass(frozen=True)
class Lowered:
    """A stock model and what the lowering did. `exact` says whether the maths is the same (up to rounding).

    `folded` says that weights were multiplied and not only copied, so that a 16-bit dtype rounds them once more.
    """

    model: PreTrainedModel
    exact: bool
    notes: tuple[str, ...]
    folded: bool = False


@dataclass(frozen=True)
class ExportReport:
    """What an export did. Bytes are a token's KV cache in `dtype`; logit differences are over random tokens.

    `kv_bytes_per_token_original`: of the model that was converted; None where that was not recorded.
    """

    target: str
    folder: str
    model_type: str
    exact: bool
    notes: tuple[str, ...]
    dtype: str
    kv_bytes_per_token_before: int
    kv_bytes_per_token_after: int
    kv_bytes_per_token_original: int | None
    max_logit_difference: float
    max_logit: float


class LargerCacheError(ValueError):
    """An export that would take more KV cache than the plan. The message has both numbers."""


def export(
    source: str | Path,
    target: str,
    out: str | Path,
    tokenizer: Any = None,
    *,
    dtype: torch.dtype | None = None,
    allow_larger_cache: bool = False,
    overwrite: bool = False,
) -> ExportReport:
    """Lower the checkpoint at `source` to `target` and write it to `out`, atomically, with `export.json`.

    Computed in float32 and rounded once to `dtype` (None: the checkpoint's own). `tokenizer`: as in `checkpoint.save`.
    The written folder is read back with plain transformers and compared in float32 with the source, whose weights are
    rounded alike. Raises, before weights are read, OutputError as `attention.io.replacing.check_folder` does and
    LargerCacheError unless a larger cache is allowed; ValueError if the target is unknown or cannot hold the plan, or
    if the copy that came back differs.
    """
    lowering = TARGETS.get(target)
    check_folder(out, overwrite=overwrite, reads=[source])
    config, own = checkpoint.load_config(source), checkpoint.original_heads(source)
    plan, dtype = plan_of_config(config), dtype or own_dtype(config, source)
    if not allow_larger_cache and has_stock_form(config, target):
        check_cache(plan, target, dtype)
    model = checkpoint.load(source, torch.float32)
    lowered = lowering(model)
    if lowered.exact and lowered.folded:
        check_equal(model, lowered.model)  # before the dtype of the checkpoint rounds what was folded
    if not lowered.folded:
        round_weights(model, dtype)
    reference = probe(model)
    stock, kind, after = [lowered.model], lowered.model.config.model_type, plan_of(lowered.model)
    exact, folded, notes = lowered.exact, lowered.folded, lowered.notes
    del (
        model,
        lowered,
    )  # and taken from its list when it is written: so that neither lies beside the copy that is read back
    report = ExportReport(
        target=target,
        folder=str(Path(out).absolute()),
        model_type=kind,
        exact=exact,
        notes=notes,
        dtype=str(dtype).removeprefix("torch."),
        kv_bytes_per_token_before=plan.kv_bytes_per_token(dtype),
        kv_bytes_per_token_after=after.kv_bytes_per_token(dtype),
        kv_bytes_per_token_original=own and own * plan.head_dim * dtype.itemsize,
        max_logit_difference=float("nan"),
        max_logit=float("nan"),
    )

    def write(fresh: Path) -> None:
        nonlocal report
        cast_weights(stock[0], dtype)
        checkpoint.write_model(stock.pop(), fresh, tokenizer)
        back = AutoModelForCausalLM.from_pretrained(str(fresh), dtype=torch.float32).eval()
        difference, largest = largest_difference(reference, probe(back)), reference.abs().max().item()
        report = replace(report, max_logit_difference=difference, max_logit=largest)
        if exact and difference > tolerance(dtype, folded) * max(largest, 1.0):
            raise ValueError(f"the exported logits differ from the source by {difference:.3g}; nothing was written")
        (fresh / REPORT_FILE).write_text(json.dumps(asdict(report), indent=1, sort_keys=True) + "\n")
        if own is not None:
            checkpoint.write_note(fresh, after, checkpoint.carried(source))

    checkpoint.write_atomically(out, write, overwrite=overwrite)
    return report


def check_cache(plan: AttentionPlan, target: str, dtype: torch.dtype) -> None:
    """Raise LargerCacheError if a stock form of the plan takes more cache than the plan itself."""
    before, after = plan.kv_bytes_per_token(dtype), stock_bytes(plan, dtype)
    if after > before:
        raise LargerCacheError(
            f"target {target} takes {after} KV bytes a token, the plan {before}: a stock format has as many KV heads "
            "in every layer as the widest layer has pairs of a key and a value head. Convert with a recipe whose keys "
            "and values share equal groups (headfold_gqa, align, gqa), or accept the larger cache: --allow-larger-cache"
        )


def tolerance(dtype: torch.dtype, folded: bool = False) -> float:
    """Relative logit difference that rounding alone may cause: tight in float32 and where weights are copied."""
    if dtype == torch.float32:
        return 1e-4
    return 32 * torch.finfo(dtype).eps if folded else 1e-3


def check_equal(one: PreTrainedModel, other: PreTrainedModel) -> None:
    """Raise ValueError unless two float32 models agree up to rounding."""
    reference = probe(one)
    difference = largest_difference(reference, probe(other))
    if difference > tolerance(torch.float32) * max(reference.abs().max().item(), 1.0):
        raise ValueError(f"the lowered model's logits differ from the source by {difference:.3g}; nothing was written")


@torch.no_grad()
def probe(model: PreTrainedModel, tokens: int = 48, seed: int = 0) -> Tensor:
    """Logits `[2, tokens, V]` on random tokens, on the CPU: what two models of one vocabulary are compared by."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (2, tokens), generator=generator)
    return model(ids.to(model.device)).logits.cpu()


def largest_difference(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()
