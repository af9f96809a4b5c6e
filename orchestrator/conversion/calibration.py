"""The statistics of a checkpoint in files: read, or made layer by layer from disk.

They are made in this process, or by Ray actors that share the sequences.

Legend: L layers, N sequences of T tokens.
"""

from __future__ import annotations

import math
import shutil
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from attention.base.progress import ProgressStage, stage
from attention.calibration.calibrate import (
    calibration_digest,
    check_sequences,
    collect,
    layer_by_layer,
    one_layer,
)
from attention.calibration.moments import STATISTICS, LayerStatistics, merged
from attention.calibration.sizes import (
    FREE_SHARE,
    MIXED,
    Mixed,
    layer_bytes,
    mixed_dtype,
    most_exact,
    stored_tokens,
)
from attention.calibration.store import (
    Calibration,
    LayerEntry,
    assemble_calibration,
    folder_of,
    stored_calibration,
    write_calibration,
    write_layer,
)
from attention.checkpoint import Checkpoint
from attention.geometry import HeadGeometry
from attention.io import checkpoint
from attention.io.layers.windows import LazyWeights, embed, stand_alone
from attention.io.precision import DTYPES
from attention.modeling.running import layer_batch
from orchestrator import checkpoints
from orchestrator.resources.memory import available_bytes
from orchestrator.resources.size import Size
from trainers.settings import threads_of

if TYPE_CHECKING:
    from orchestrator.cluster.task_queue import FinishedCall, TaskQueue

SHARED_BYTES = 2**30
"""Bytes of all layers' exact statistics from which on Ray actors share the pass, since their start
is worth it then, and from which on a line says how the mixed moments are stored."""
PARTS = 8
"""Parts that the sequences of a shared pass are split into, for any number of actors: their sums
are added in the order of the parts, so that the statistics do not depend on that number."""
_LAYERS_AHEAD = 2
"""Layers of which parts may be there before the first of them is merged: the bound of memory."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Workers:
    """Ray actors that share a calibration pass.

    Attributes:
        count: How many at most; one is enough.
        options: Of each, as `ray.remote` takes them.
    """

    count: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class CalibrationPass:
    """A calibration pass over a checkpoint, which can be sent to other processes.

    Attributes:
        model: The checkpoint.
        dtype: Name of the dtype of what is written.
        device: The device to compute on.
        mixed: How the mixed moments are stored.
    """

    model: Checkpoint
    dtype: str
    device: str
    mixed: Mixed

    @property
    def working(self) -> torch.dtype:
        return DTYPES[checkpoints.working_dtype(self.dtype, self.device)]

    def layers(self, sequences: Tensor, sampled: int) -> Iterator[LayerStatistics]:
        """Yield the statistics of each layer; of the first `sampled` sequences with inputs.

        Args:
            sequences: `[N, T]` token ids.
            sampled: Number of sequences whose inputs are stored.
        """
        config = self.model.config
        if not stand_alone(config):
            model = checkpoints.load_working(self.model, self.dtype, self.device)
            yield from collect(model, sequences, sampled=sampled, mixed=self.mixed)
            return
        yield from layer_by_layer(
            LazyWeights(self.model.folder, config),
            config,
            sequences,
            dtype=self.working,
            device=checkpoints.device_of(self.device),
            sampled=sampled,
            batch_size=self._batch_size(sequences),
            mixed=self.mixed,
        )

    def _batch_size(self, sequences: Tensor) -> int:
        return layer_batch(self.model.geometry.num_heads, sequences.shape[1])

    def enter(self, weights: LazyWeights, sequences: Tensor) -> Tensor:
        """Return what enters layer 0, `[N, T, D]`."""
        device = checkpoints.device_of(self.device)
        batch_size = self._batch_size(sequences)
        return embed(weights, self.model.config, sequences, self.working, device, batch_size)

    def layer(
        self, weights: LazyWeights, layer: int, streams: Tensor, sampled: int
    ) -> LayerStatistics:
        """Return the statistics of one layer as `layers` yields them.

        Args:
            weights: Those of the checkpoint.
            layer: Its number.
            streams: `[N, T, D]`, what enters it; replaced in place by what leaves it.
            sampled: Number of sequences whose inputs are stored.
        """
        return one_layer(
            weights,
            self.model.config,
            layer,
            streams,
            dtype=self.working,
            device=checkpoints.device_of(self.device),
            sampled=sampled,
            batch_size=self._batch_size(streams),
            mixed=self.mixed,
        )

    def digest(self, sequences: Tensor, weights: str) -> str:
        """Return the digest of all that the statistics depend on.

        Args:
            sequences: `[N, T]` token ids.
            weights: Digest of the checkpoint's weights.
        """
        tokens = stored_tokens(sequences.shape[-1])
        return calibration_digest(
            self.model.config, weights, sequences, tokens, self.working, self.mixed
        )


def checkpoint_calibration(
    model: checkpoints.CheckpointSource,
    sequences: Tensor,
    cache_dir: str | Path,
    *,
    dtype: str,
    device: str = "cpu",
    weights: str | None = None,
    mixed: Mixed | None = None,
    workers: Workers | None = None,
) -> Calibration:
    """Return the statistics of a checkpoint over `sequences`, stored under `cache_dir`.

    They are found by the digest of all that they depend on; stored ones are neither read nor hashed
    again before a layer is used.

    Args:
        model: The checkpoint.
        sequences: `[N, T]` token ids.
        cache_dir: The folder.
        dtype: Name of the dtype of what is written.
        device: The device to compute on.
        weights: Digest of the checkpoint's weights, where it is known.
        mixed: How the mixed moments are stored; by default the most exact way for which half of the
            free disk is enough, and of the free memory where layers cannot stand alone.
        workers: Ray actors to share the pass, of a checkpoint that `is_shared`. This process then
            waits for them and must hold nothing that they need.

    Raises:
        ValueError: For tokens that do not fit the model.
        OSError: If the folder cannot be written.
    """
    opened = Checkpoint.open(model)
    check_sequences(sequences, opened.geometry, stored_tokens(sequences.shape[-1]))
    weights = weights or checkpoint.weights_digest(opened.folder, cache_dir)
    # What was chosen when more was free, or less, is as good
    for way in MIXED if mixed is None else (mixed,):
        digest = CalibrationPass(opened, dtype, device, way).digest(sequences, weights)
        if (stored := stored_calibration(folder_of(cache_dir, digest), digest)) is not None:
            return stored
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_dir).free
    in_memory = not stand_alone(opened.config)  # the model, and the sums of all layers at once
    if in_memory and (memory := available_bytes()):
        if checkpoints.device_of(device).type == "cpu":
            working = DTYPES[checkpoints.working_dtype(dtype, device)]
            memory -= working.itemsize * Size.of(opened.config).total
        free = min(free, max(memory, 1))
    mixed = mixed or choose_mixed(
        opened.geometry, sequences.numel(), free, sequences.shape[1], in_memory=in_memory
    )
    task = CalibrationPass(opened, dtype, device, mixed)
    return _calibrate(task, sequences, weights, cache_dir, workers)


def _calibrate(
    task: CalibrationPass,
    sequences: Tensor,
    weights: str,
    cache_dir: str | Path,
    workers: Workers | None,
) -> Calibration:
    """Make a pass and store its statistics. Arguments as those of `checkpoint_calibration`."""
    length = sequences.shape[1]
    sampled = min(stored_tokens(length) // length, len(sequences))
    digest = task.digest(sequences, weights)
    path = folder_of(cache_dir, digest)
    same = (sequences.numel(), digest, weights, task.mixed)
    with stage("calibrating", task.model.geometry.num_layers, "layers") as progress:
        if workers is not None:
            write = partial(calibrate_on_workers, task, sequences, sampled, workers)
            return assemble_calibration(path, lambda to: _counted(write(to), progress), *same)
        return write_calibration(path, _counted(task.layers(sequences, sampled), progress), *same)


def is_shared(model: Checkpoint, sequences: Tensor) -> bool:
    """Return whether a pass over `sequences` is worth several processes, and can have them."""
    geometry = model.geometry
    size = layer_bytes(geometry, sequences.numel(), length=sequences.shape[1])
    return geometry.num_layers * size >= SHARED_BYTES and stand_alone(model.config)


def _counted(layers: Iterable[_T], progress: ProgressStage) -> Iterator[_T]:
    """Yield the same layers; each counts as done when the next one is requested."""
    for layer in layers:
        yield layer
        progress.step()


def choose_mixed(
    geometry: HeadGeometry, tokens: int, free: float, length: int, *, in_memory: bool = False
) -> Mixed:
    """Return how to store the mixed moments where so many bytes of disk or memory are free.

    `length` is that of a sequence. Large statistics are reported in a line on stderr.
    """
    limit = FREE_SHARE * (free or math.inf)
    mixed = most_exact(geometry, tokens, limit, length, in_memory=in_memory)
    exact = geometry.num_layers * layer_bytes(geometry, tokens, MIXED[0], length)
    stored = geometry.num_layers * layer_bytes(geometry, tokens, mixed, length)
    if exact >= SHARED_BYTES:
        print(
            f"calibration: mixed moments kept as {mixed}, {stored / 2**30:.1f} GiB in all (exact "
            f"{exact / 2**30:.1f} GiB; {free / 2**30:.1f} GiB free)",
            file=sys.stderr,
            flush=True,
        )
    return mixed


# ---- by Ray actors ------------------------------------------------------------------------------
# The sequences are split into parts, and a call of an actor takes one part through one layer. What
# leaves the layer and the part's sums stay in Ray's object store; once the sums of all parts are
# there, another call merges them and writes the layer's file. No call waits for another one, and
# none needs a certain actor, so that one actor makes the whole pass.


class _Part(NamedTuple):
    """Sequences of a part, and of how many of them inputs are stored."""

    sequences: Tensor
    sampled: int


class _Sums(NamedTuple):
    """Statistics of a part in a layer as arrays that other processes map."""

    tokens: int
    arrays: dict[str, np.ndarray]


class _CalibrationActor:
    """An actor of a shared pass."""

    def __init__(self, task: CalibrationPass, parts: Sequence[_Part], threads: int) -> None:
        torch.set_num_threads(threads)
        # Sums are rounded once, when they are whole
        self._whole = replace(task, mixed="float32") if task.mixed == "bfloat16" else task
        self._stored = mixed_dtype(task.mixed)
        self._weights = LazyWeights(task.model.folder, task.model.config)
        self._parts = parts

    def advance(
        self, number: int, layer: int, entering: np.ndarray | None
    ) -> tuple[None, np.ndarray, _Sums]:
        """Take a part through a layer.

        Args:
            number: Of the part.
            layer: Number of the layer.
            entering: What enters the layer; None to take the part through all layers below too.

        Returns:
            None, what leaves the layer, and the part's sums.
        """
        part = self._parts[number]
        if entering is None:
            streams = self._whole.enter(self._weights, part.sequences)
            for below in range(layer):
                self._whole.layer(self._weights, below, streams, part.sampled)
        else:
            streams = _tensor(entering).view(self._whole.working).clone()
        layer_of_part = self._whole.layer(self._weights, layer, streams, part.sampled)
        arrays = {name: getattr(layer_of_part, name).numpy() for name in STATISTICS}
        # numpy has no bfloat16
        return None, streams.view(torch.uint8).numpy(), _Sums(layer_of_part.tokens, arrays)

    def merge(self, layer: int, folder: Path, *sums: _Sums) -> LayerEntry:
        """Write the statistics of a layer from the sums of all parts, in their order."""
        whole = merged(
            [
                LayerStatistics(
                    part.tokens, **{name: _tensor(array) for name, array in part.arrays.items()}
                )
                for part in sums
            ]
        )
        moments = whole.mixed_moments.to(self._stored)
        return write_layer(folder, layer, replace(whole, mixed_moments=moments))


def _tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        # The arrays are Ray's and cannot be written to, nor are they
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def calibrate_on_workers(
    task: CalibrationPass, sequences: Tensor, sampled: int, workers: Workers, folder: Path
) -> Iterator[LayerEntry]:
    """Write the statistics of `CalibrationPass.layers` into a folder; yield the layers' entries.

    They are equal to one process's up to rounding, and the same for any number of actors.

    Args:
        task: The pass.
        sequences: `[N, T]` token ids.
        sampled: Number of sequences whose inputs are stored.
        workers: The actors.
        folder: Where every actor can write.

    Raises:
        RayActorError: If actors are lost again and again.
    """
    from orchestrator.cluster.task_queue import TaskQueue

    split = sequences.tensor_split(min(PARTS, len(sequences)))
    firsts = np.cumsum([0, *map(len, split)])
    parts = [
        _Part(part, int(np.clip(sampled - first, 0, len(part))))
        for part, first in zip(split, firsts, strict=False)
    ]
    count = min(workers.count, len(parts))
    threads = threads_of(workers.options["num_cpus"])
    arguments = (task, parts, threads)
    print(f"calibration: up to {count} workers share {len(sequences)} sequences", flush=True)
    with TaskQueue(_CalibrationActor, arguments, workers.options, count, "calibrating") as queue:
        layers = task.model.geometry.num_layers
        yield from _SharedPass(queue, layers, len(parts), folder.absolute()).run()


class _SharedPass:
    """A shared pass from the side that queues its calls."""

    def __init__(self, queue: TaskQueue, layers: int, parts: int, folder: Path) -> None:
        self._queue = queue
        self._layers = layers
        self._parts = range(parts)
        self._folder = folder
        self._entered = dict.fromkeys(self._parts, -1)  # the highest layer of each part
        self._following: dict[int, Any] = {}  # what leaves that layer, once it is known
        self._sums: defaultdict[int, dict[int, Any]] = defaultdict(dict)  # by layer and part
        self._entries: dict[int, LayerEntry] = {}

    def run(self) -> Iterator[LayerEntry]:
        """Yield the entries of the layers in order."""
        self._following = dict.fromkeys(self._parts)
        for layer in range(self._layers):
            self._go_on(layer)
            while layer not in self._entries:
                self._take(self._queue.next())
                self._go_on(layer)
            yield self._entries[layer]

    def _go_on(self, first: int) -> None:
        """Queue parts that are ready for their next layer.

        Args:
            first: The first layer that is not written yet.
        """
        end = min(first + _LAYERS_AHEAD, self._layers)
        for part in [part for part in self._following if self._entered[part] + 1 < end]:
            self._entered[part] += 1
            self._advance(part, self._entered[part], self._following.pop(part))

    def _advance(self, part: int, layer: int, entering: Any) -> None:
        self._queue.put((layer, part), "advance", part, layer, entering, results=2)

    def _take(self, finished: FinishedCall) -> None:
        """Queue what a call that is over makes possible, or what was lost with its actor."""
        layer, part = finished.key
        if finished.lost:
            # What had been computed may have gone with the same node: from the first layer on
            for each in self._parts if part is None else [part]:
                self._sums[layer].pop(each, None)
                self._advance(each, layer, None)
        elif part is None:
            self._entries[layer] = finished.value
            del self._sums[layer]
        else:
            leaving, self._sums[layer][part] = finished.results
            if layer == self._entered[part]:
                self._following[part] = leaving
            if len(self._sums[layer]) == len(self._parts):
                every = [self._sums[layer][each] for each in self._parts]
                self._queue.put((layer, None), "merge", layer, self._folder, *every, first=True)
