"""The statistics of a checkpoint in files: read, or made layer by layer from disk.

They are made in this process, or by Ray tasks that share the sequences.

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
from attention.calibration.calibrate import (
    calibration_digest,
    check_sequences,
    collect,
    layer_by_layer,
)
from attention.calibration.moments import STATISTICS, LayerStatistics, merged
from attention.calibration.sizes import (
    FREE_SHARE,
    MIXED,
    SAMPLE_TOKENS,
    Mixed,
    layer_bytes,
    mixed_dtype,
    most_exact,
)
from attention.calibration.store import (
    Calibration,
    folder_of,
    stored_calibration,
    write_calibration,
)
from attention.checkpoint import Checkpoint
from attention.geometry import HeadGeometry
from attention.io import checkpoint
from attention.io.layers.windows import LazyWeights, check_windows
from attention.io.precision import DTYPES
from attention.modeling.running import layer_batch
from orchestrator import checkpoints

SHARED_BYTES = 2**30
"""Bytes of all layers' exact statistics from which on Ray tasks share the pass, since their start
is worth it then, and from which on a line says how the mixed moments are stored."""


@dataclass(frozen=True)
class Workers:
    """Ray tasks that share a calibration pass: how many at a time, and what each has."""

    count: int
    cpus: float
    gpus: float


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
        yield from layer_by_layer(
            LazyWeights(self.model.folder, config),
            config,
            sequences,
            dtype=self.working,
            device=checkpoints.device_of(self.device),
            sampled=sampled,
            batch_size=layer_batch(self.model.geometry.num_heads, sequences.shape[1]),
            mixed=self.mixed,
        )

    def layers_in_memory(self, sequences: Tensor, sampled: int) -> Iterator[LayerStatistics]:
        """Yield the same for a checkpoint whose layers cannot stand alone."""
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
            free disk is enough.
        workers: Ray tasks to share the pass.

    Raises:
        ValueError: For tokens that do not fit the model.
        OSError: If the folder cannot be written.
    """
    opened = Checkpoint.open(model)
    config = opened.config
    geometry = opened.geometry
    check_sequences(sequences, geometry, SAMPLE_TOKENS)
    weights = weights or checkpoint.weights_digest(opened.folder, cache_dir)
    working = DTYPES[checkpoints.working_dtype(dtype, device)]

    def folder(mixed: Mixed) -> tuple[Path, str]:
        digest = calibration_digest(config, weights, sequences, SAMPLE_TOKENS, working, mixed)
        return folder_of(cache_dir, digest), digest

    # What was chosen when more was free, or less, is as good
    for way in MIXED if mixed is None else (mixed,):
        if (stored := stored_calibration(*folder(way))) is not None:
            return stored
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    mixed = mixed or choose_mixed(geometry, sequences.numel(), shutil.disk_usage(cache_dir).free)
    task = CalibrationPass(opened, dtype, device, mixed)
    sampled = min(SAMPLE_TOKENS // sequences.shape[1], len(sequences))
    large = geometry.num_layers * layer_bytes(geometry, sequences.numel()) >= SHARED_BYTES
    try:
        check_windows(config)
        layers = task.layers(sequences, sampled)
        if large and workers is not None:
            layers = layers_by_workers(task, sequences, sampled, workers)
    except ValueError:
        layers = task.layers_in_memory(sequences, sampled)
    path, digest = folder(mixed)
    with stage("calibrating", geometry.num_layers, "layers") as progress:
        counted = _counted(layers, progress)
        return write_calibration(path, counted, sequences.numel(), digest, weights, mixed)


def _counted(
    layers: Iterator[LayerStatistics], progress: ProgressStage
) -> Iterator[LayerStatistics]:
    """Yield the same layers; each counts as done when the next one is requested."""
    for layer in layers:
        yield layer
        progress.step()


def choose_mixed(geometry: HeadGeometry, tokens: int, free: float) -> Mixed:
    """Return how to store the mixed moments where so many bytes of disk or memory are free.

    Of large statistics a line on stderr reports it.
    """
    mixed = most_exact(geometry, tokens, FREE_SHARE * (free or math.inf))
    exact = geometry.num_layers * layer_bytes(geometry, tokens, MIXED[0])
    stored = geometry.num_layers * layer_bytes(geometry, tokens, mixed)
    if exact >= SHARED_BYTES:
        print(
            f"calibration: mixed moments kept as {mixed}, {stored / 2**30:.1f} GiB in all (exact "
            f"{exact / 2**30:.1f} GiB; {free / 2**30:.1f} GiB free)",
            file=sys.stderr,
            flush=True,
        )
    return mixed


# ---- by Ray tasks -------------------------------------------------------------------------------
# Each task carries its sequences through all layers and hands over the sums of a layer before it
# begins the next but one, so that of every task two layers' statistics exist at most.


def layers_by_workers(
    task: CalibrationPass, sequences: Tensor, sampled: int, workers: Workers
) -> Iterator[LayerStatistics]:
    """Yield `CalibrationPass.layers`, of which each task computes a share of the sequences.

    They are equal to one process's up to rounding.

    Raises:
        RayError: If a task fails twice.
    """
    import ray

    parts = sequences.tensor_split(min(workers.count, len(sequences)))
    firsts = np.cumsum([0, *map(len, parts)])
    remote: Any = ray.remote(_partial).options(
        num_cpus=workers.cpus,
        num_gpus=workers.gpus,
        max_retries=1,
        num_returns="streaming",
        _generator_backpressure_num_objects=1,
    )
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


def _partial(
    task: CalibrationPass, sequences: Tensor, sampled: int, threads: int
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield tokens and statistics of each layer, as arrays that other processes map. A Ray task."""
    torch.set_num_threads(threads)
    for layer in task.layers(sequences, sampled):
        yield layer.tokens, {name: getattr(layer, name).numpy() for name in STATISTICS}


def _statistics(tokens: int, arrays: dict[str, np.ndarray]) -> LayerStatistics:
    with warnings.catch_warnings():
        # The arrays are Ray's and cannot be written to, nor are they
        warnings.simplefilter("ignore", UserWarning)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return LayerStatistics(tokens, **tensors)
