"""Lowering a converted checkpoint to a stock format, with a report of what it costs.

One file a target in `attention/lowerings`; each is a function `(model) -> Lowered`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from attention import checkpoint
from attention.axes import Axis
from attention.modeling import plan_of

TARGETS = Axis("target", "attention.lowerings")
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
    """What an export did. Bytes are a token's KV cache in `dtype`; logit differences are over random tokens."""

    target: str
    folder: str
    model_type: str
    exact: bool
    notes: tuple[str, ...]
    dtype: str
    kv_bytes_per_token_before: int
    kv_bytes_per_token_after: int
    kv_bytes_per_token_mha: int
    max_logit_difference: float
    max_logit: float

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def export(source: str | Path, target: str, out: str | Path, tokenizer: Any = None) -> ExportReport:
    """Lower the checkpoint at `source` to `target` and write it to `out`, atomically, with `export.json`.

    The written folder is read back with plain transformers and compared with the source in float32. Raises
    ValueError if the target is unknown or cannot hold the plan, or if the copy that came back differs.
    """
    lowering = TARGETS.get(target)
    model = checkpoint.load(source)
    plan, dtype = plan_of(model), model.dtype
    lowered = lowering(model.float())
    if lowered.exact and lowered.folded:
        check_equal(model, lowered.model)  # before the dtype of the checkpoint rounds what was folded
    after = plan_of(lowered.model)
    report = ExportReport(
        target=target,
        folder=str(Path(out).absolute()),
        model_type=lowered.model.config.model_type,
        exact=lowered.exact,
        notes=lowered.notes,
        dtype=str(dtype).removeprefix("torch."),
        kv_bytes_per_token_before=plan.kv_bytes_per_token(dtype),
        kv_bytes_per_token_after=after.kv_bytes_per_token(dtype),
        kv_bytes_per_token_mha=plan.kv_bytes_per_token(dtype) * 2 * plan.num_layers * plan.num_heads // plan.kv_heads,
        max_logit_difference=float("nan"),
        max_logit=float("nan"),
    )

    def write(fresh: Path) -> None:
        nonlocal report
        lowered.model.to(dtype).save_pretrained(fresh, safe_serialization=True)
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
        back = AutoModelForCausalLM.from_pretrained(str(fresh), dtype=torch.float32).eval()
        difference, largest = compare(model, back)
        report = replace(report, max_logit_difference=difference, max_logit=largest)
        if lowered.exact and difference > tolerance(dtype, lowered.folded) * max(largest, 1.0):
            raise ValueError(f"the exported logits differ from the source by {difference:.3g}; nothing was written")
        (fresh / REPORT_FILE).write_text(report.to_json() + "\n")

    checkpoint.write_atomically(out, write)
    return report


def tolerance(dtype: torch.dtype, folded: bool = False) -> float:
    """Relative logit difference that rounding alone may cause: tight in float32 and where weights are copied."""
    if dtype == torch.float32:
        return 1e-4
    return 32 * torch.finfo(dtype).eps if folded else 1e-3


def check_equal(one: PreTrainedModel, other: PreTrainedModel) -> None:
    """Raise ValueError unless two float32 models agree up to rounding."""
    difference, largest = compare(one, other)
    if difference > tolerance(torch.float32) * max(largest, 1.0):
        raise ValueError(f"the lowered model's logits differ from the source by {difference:.3g}; nothing was written")


@torch.no_grad()
def compare(one: PreTrainedModel, other: PreTrainedModel, tokens: int = 48, seed: int = 0) -> tuple[float, float]:
    """Largest absolute logit difference, and the largest logit, of two models on the same random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(one.config.vocab_size, (2, tokens), generator=generator).to(one.device)
    a, b = one(ids).logits, other(ids.to(other.device)).logits.to(one.device)
    return (a - b).abs().max().item(), a.abs().max().item()
