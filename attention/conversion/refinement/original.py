"""The original model, and what it does at each layer on the texts of fits and checks.

Estimates of loss increases, local fits and refits look at the same layers on the same sequences. A
small model runs through them once; of a large one, whose fits take most of the time, each layer is
run again when it is used.

Legend: L layers, N sequences, T tokens, D model dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attention.conversion.refinement.capture import Record, recorded
from attention.families import family_of
from attention.modeling.running import AT_ONCE, Streams, batch_of

STORED_BYTES = 512 * 2**20
"""Most that an `Original` keeps of what its layers do."""


def bytes_to_keep(layers: int, tokens: int, width: int, itemsize: int) -> int:
    """Return the bytes stored for so many tokens, of which an eighth is for the check.

    All that enters and leaves the attention of each layer, and what enters the layer.
    """
    needed = 3 * layers * tokens * width * itemsize
    return min(needed, STORED_BYTES) if needed * 7 // 8 <= STORED_BYTES else 0


class Original:
    """An original model, of whose activations at most `most` bytes are stored."""

    def __init__(self, model: PreTrainedModel, most: int = STORED_BYTES) -> None:
        self.model = model
        self.room = most
        self.modules = tuple(family_of(model.config).attention_modules(model))
        self._texts: dict[Any, Text] = {}

    @classmethod
    def of(cls, model: PreTrainedModel | Original) -> Original:
        """Return the same if it is one already; of a model one that keeps nothing."""
        return model if isinstance(model, Original) else cls(model, most=0)

    def on(self, sequences: Tensor, batch_size: int = AT_ONCE) -> Text:
        """Return the model on `sequences` `[N, T]`: the same object for the same tokens."""
        batch_size = batch_of(sequences.shape[1], batch_size)
        key = (batch_size, sequences.shape, sequences.cpu().numpy().tobytes())
        if key not in self._texts:
            self._texts[key] = Text(self, sequences, batch_size)
        return self._texts[key]

    def keeps(self, needed: int) -> bool:
        """Return whether this many more bytes are stored.

        Once they are too many nothing further is: half of what layers do would save little.
        """
        fits = needed <= self.room
        self.room = self.room - needed if fits else 0
        return fits


class Text:
    """The inputs and outputs of any layer of an original model on some sequences."""

    def __init__(self, original: Original, sequences: Tensor, batch_size: int) -> None:
        self.original = original
        self.batch_size = batch_size
        self._streams = Streams(original.model, original.modules, sequences, batch_size)
        self._records: dict[int, tuple[Record, ...]] = {}
        self._outputs: list[Tensor] = []  # of the attention of the present layer
        self._keeps: bool | None = None  # known once the size of a record is

    def at(self, layer: int) -> Iterable[Record]:
        """Yield one record per batch. Can be iterated once."""
        if layer in self._records:
            return self._records[layer]
        if layer - 1 == self._streams.layer and len(self._outputs) == len(self._streams.batches):
            self._streams.advance(layer, self._outputs)
        self._outputs = []
        records = recorded(self._streams, layer)
        if self._keeps is None:
            records = self._decided(records)
        records = self._watched(records)
        if self._keeps:
            records = self._records[layer] = tuple(records)
        return records

    def _watched(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the same records.

        The output of the attention is stored, so that it need not run again to reach the next
        layer.
        """
        for record in records:
            self._outputs.append(record.output)
            yield record

    def _decided(self, records: Iterator[Record]) -> Iterator[Record]:
        first = next(records)
        self._keeps = self.original.keeps(
            first.nbytes * len(self._streams.batches) * len(self.original.modules)
        )
        return chain([first], records)
