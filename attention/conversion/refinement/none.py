"""No refinement: the closed-form conversion as it is."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from attention.conversion.refinement.axis import REFINEMENT, RefinementReport


@REFINEMENT.part("none", source="-")
def keep(
    original: PreTrainedModel, converted: PreTrainedModel, sequences: Tensor | None, *, first: int = 0
) -> RefinementReport:
    """Leave the converted model alone."""
    return RefinementReport()
