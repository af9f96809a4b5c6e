"""The statistics of a checkpoint, in files: those that are there, or made layer by layer from disk, in this process or
by Ray tasks that share the sequences.

Legend: L layers, N sequences of T tokens.
"""

from __future__ import annotations

import math
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.base.progress import ProgressStage, stage
from attention.calibration.calibrate import calibration_digest, check_sequences, collect, layer_by_layer
from attention.calibration.moments import STATISTICS, LayerStatistics, merged
from attention.calibration.sizes import FREE_SHARE, MIXED, SAMPLE_TOKENS, Mixed, layer_bytes, mixed_dtype, most_exact
from attention.calibration.store import Calibration, folder_of, stored_calibration, write_calibration
from attention.checkpoint import Checkpoint
from attention.geometry import HeadGeometry
from attention.io import checkpoint
from attention.io.layers.windows import LazyWeights, check_windows
from attention.io.precision import DTYPES
from attention.modeling.running import layer_batch
from orchestrator import checkpoints

LARGE = 2**30
"""Bytes of all layers' exact statistics from which on Ray tasks share the pass, since their start is worth it then, and
from which on the choice of how they are kept is said."""


@dataclass(frozen=True)
class Workers:
    """Ray tasks that share a calibration pass: how many at a time, and what each has."""

    count: int
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Pass:
    """A calibration pass over a checkpoint, that can be sent to other processes.

    `dtype`: of what is written; `mixed`: how the mixed moments are kept.
    """

    model: Checkpoint
    dtype: str
    device: str
    mixed: Mixed

    @property
    def working(self) -> torch.dtype:
        return DTYPES[checkpoints.working_dtype(self.dtype, self.device)]

    def layers(self, sequences: Tensor, sampled: int, **more: Any) -> Iterator[LayerStatistics]:
        """Statistics of layer after layer; inputs are stored of the first `sampled` sequences."""
        config = self.model.config
        size = layer_batch(self.model.geometry.num_heads, sequences.shape[1])
        where = {"dtype": self.working, "device": checkpoints.device_of(self.device)}
        own = {"sampled": sampled, "batch_size": size, "mixed": self.mixed}
        yield from layer_by_layer(LazyWeights(self.model.folder, config), config, sequences, **where, **own, **more)

    def layers_in_memory(self, sequences: Tensor, sampled: int) -> Iterator[LayerStatistics]:
        """The same of a checkpoint whose layers cannot stand alone."""
        model = checkpoints.load_working(self.model, self.dtype, self.device)
        yield from collect(model, sequences, sampled=sampled, mixed=self.mixed)


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
    """The statistics of a checkpoint over `sequences` `[N, T]`, kept under `cache_dir` by the digest of all that they
    depend on. What is there is neither read nor hashed again before a layer is used.

    `dtype`: of what is written; `weights`: the digest of the checkpoint's weights, if it is known; `mixed`: how the
    mixed moments are kept, by default the most exact way for which half of the free disk is enough. `workers`: Ray
    tasks to share the pass. Raises ValueError for tokens that do not fit the model, OSError if the folder cannot be
    written.
    """
    opened = Checkpoint.open(model)
    config, geometry = opened.config, opened.geometry
    check_sequences(sequences, geometry, SAMPLE_TOKENS)
    weights = weights or checkpoint.weights_digest(opened.folder, cache_dir)
    working = DTYPES[checkpoints.working_dtype(dtype, device)]

    def folder(mixed: Mixed) -> tuple[Path, str]:
        digest = calibration_digest(config, weights, sequences, SAMPLE_TOKENS, working, mixed)
        return folder_of(cache_dir, digest), digest

    # What was chosen when more was free, or less, is as good
    for way in MIXED if mixed is None else (mixed,):
        if (found := stored_calibration(*folder(way))) is not None:
            return found
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    mixed = mixed or chosen(geometry, sequences.numel(), shutil.disk_usage(cache_dir).free)
    task, sampled = Pass(opened, dtype, device, mixed), min(SAMPLE_TOKENS // sequences.shape[1], len(sequences))
    large = geometry.num_layers * layer_bytes(geometry, sequences.numel()) >= LARGE
    try:
        check_windows(config)
        layers = task.layers(sequences, sampled)
        if large and workers is not None:
            layers = layers_by_workers(task, sequences, sampled, workers)
    except ValueError:
        layers = task.layers_in_memory(sequences, sampled)
    place, digest = folder(mixed)
    with stage("calibrating", geometry.num_layers, "layers") as told:
        return write_calibration(place, counted(layers, told), sequences.numel(), digest, weights, mixed)


def counted(layers: Iterator[LayerStatistics], told: ProgressStage) -> Iterator[LayerStatistics]:
    """The same layers; each is told as done when the next one is asked for."""
    for layer in layers:
        yield layer
        told.step()


def chosen(geometry: HeadGeometry, tokens: int, free: float) -> Mixed:
    """How the mixed moments are kept where so many bytes of disk or memory are free; of large statistics a line on
    stderr says so."""
    mixed = most_exact(geometry, tokens, FREE_SHARE * (free or math.inf))
    exact, own = (geometry.num_layers * layer_bytes(geometry, tokens, m) / 2**30 for m in (MIXED[0], mixed))
    if exact >= LARGE / 2**30:
        sizes = f"{own:.1f} GiB in all (exact {exact:.1f} GiB; {free / 2**30:.1f} GiB free)"
        print(f"calibration: mixed moments kept as {mixed}, {sizes}", file=sys.stderr, flush=True)
    return mixed


# ---- by Ray tasks ---------------------------------------------------------------------------------------------------
# Each task carries its sequences through all layers and hands over the sums of a layer before it begins the next but
# one, so that of every task two layers' statistics exist at most.


def layers_by_workers(task: Pass, sequences: Tensor, sampled: int, workers: Workers) -> Iterator[LayerStatistics]:
    """`Pass.layers`, each task with a share of the sequences; equal to one process's up to rounding.

    Raises RayError if a task fails twice.
    """
    import ray

    parts = sequences.tensor_split(min(workers.count, len(sequences)))
    firsts = np.cumsum([0, *map(len, parts)])
    own = {"num_cpus": workers.cpus, "num_gpus": workers.gpus, "max_retries": 1}
    remote: Any = ray.remote(_partial).options(**own, num_returns="streaming", _generator_backpressure_num_objects=1)
    threads = max(1, int(workers.cpus))
    # Sums are rounded once, when they are whole
    whole = replace(task, mixed="float32") if task.mixed == "bfloat16" else task
    running = [
        remote.remote(whole, part, int(np.clip(sampled - first, 0, len(part))), threads)
        for part, first in zip(parts, firsts, strict=False)
    ]
    print(f"calibration: {len(parts)} tasks share {len(sequences)} sequences", flush=True)
    for _ in range(task.model.geometry.num_layers):
        together = merged([_statistics(*ray.get(next(results))) for results in running])
        yield replace(together, mixed_moments=together.mixed_moments.to(mixed_dtype(task.mixed)))


def _partial(task: Pass, sequences: Tensor, sampled: int, threads: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """A Ray task: tokens and statistics of layer after layer, as arrays that other processes map."""
    torch.set_num_threads(threads)
    for layer in task.layers(sequences, sampled):
        yield layer.tokens, {name: getattr(layer, name).numpy() for name in STATISTICS}


def _statistics(tokens: int, arrays: dict[str, np.ndarray]) -> LayerStatistics:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the arrays are Ray's and cannot be written to, nor are they
        return LayerStatistics(tokens, **{name: torch.from_numpy(array) for name, array in arrays.items()})
