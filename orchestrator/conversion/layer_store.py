"""The steps of a conversion, written once against a store of the checkpoint's layers.

A store has all layers in memory (`MemoryStore`), or one at a time from disk (`DiskStore`), where a
killed conversion can be resumed. Operations on a layer are the same code for both, since a window
of one layer is a model: `make_plan` or its parts by layer, `convert_with`, `refine_with`. The store
decides how a step goes through the layers, since parts of a recipe that compare or run all layers,
and several KV ratios from one calibration, need the whole model, while bounded memory needs a layer
to be calibrated, planned, fused and fitted before the next one is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Generic, TypeVar

from attention.base.timing import Phases
from attention.conversion.refinement.refine import FitWork
from attention.plan import AttentionPlan
from orchestrator.conversion.execution import cost
from orchestrator.conversion.record import ConversionRecord
from orchestrator.conversion.request import ConversionRequest
from search_spaces.allocation.problem import Counts
from trainers.text.data import LoadedTexts

LayersT = TypeVar("LayersT")
LayerPlans = AttentionPlan | Counts
"""A plan, or (key heads, value heads) of each layer where layers are grouped one by one."""


class LayerStore(ABC, Generic[LayersT]):
    """The layers of a checkpoint, with the texts to calibrate and to measure on.

    `LayersT` is what the converted layers are: a model, or the folder that has them.

    Attributes:
        request: The conversion.
        texts: Calibration and held-out tokens.
        phases: Seconds of the present conversion by phase.
        work: Of the present conversion's fits.
    """

    def __init__(self, request: ConversionRequest, texts: LoadedTexts) -> None:
        self.request = request
        self.texts = texts
        self.phases = request.phases
        self.work: list[FitWork] = []

    def run(
        self, kv_ratio: float, out: Path | None = None, *, overwrite: bool = False
    ) -> ConversionRecord:
        """Convert at one KV ratio or the largest below it, measure, and save to `out` if given."""
        request = self.request
        self.phases = Phases(request.phases)
        self.work = []
        with self.opened(kv_ratio, out, overwrite):
            plans = self.plan(request.budget(kv_ratio))
            plan, layers = self.convert(plans)
            polished = self.polish(layers)
            measured = {**self.measure(layers), **polished}
            if out is not None:
                measured = {**measured, **self.write(plan, layers, out, overwrite)}
        record = request.record(plan, kv_ratio, self.texts, measured, out)
        record["cost"] = cost(self.work, self.phases)
        record["seconds"] = dict(self.phases)
        return record

    @contextmanager
    def opened(self, kv_ratio: float, out: Path | None, overwrite: bool) -> Iterator[None]:
        """Hold what the steps of one conversion need."""
        yield

    @abstractmethod
    def plan(self, budget: Fraction) -> LayerPlans:
        """Calibrate, estimate loss increases and choose the heads of each layer."""

    @abstractmethod
    def convert(self, plans: LayerPlans) -> tuple[AttentionPlan, LayersT]:
        """Align, fuse and fit the heads of all layers; return the plan that is carried out, too."""

    def polish(self, layers: LayersT) -> Mapping[str, Any]:
        """Train the converted layers for the steps of the request; return what the record says."""
        return {}

    @abstractmethod
    def measure(self, layers: LayersT) -> Mapping[str, Any]:
        """Return fields of the record: held-out losses, those of the original, and cache bytes."""

    @abstractmethod
    def write(
        self, plan: AttentionPlan, layers: LayersT, out: Path, overwrite: bool
    ) -> Mapping[str, Any]:
        """Write the checkpoint, and return what only that shows for the record."""
