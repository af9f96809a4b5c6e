"""DHA's search phase for a search.

It is measured once per seed on the cluster, cached, and read by every trial. A file is named by the
digest of all that the distances depend on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from attention.io import checkpoint
from attention.io.files import written_whole
from orchestrator import checkpoints
from search_spaces.recipes.recipe import Recipe
from search_spaces.site import FUSION_DISTANCES
from trainers.loop import LossFunction
from trainers.settings import TrainSettings
from trainers.text.token_sets import TokenSequences, read_sequences

Distances = dict[str, np.ndarray]
"""`[L, H, H]` float32 of "key" and of "value"."""


@dataclass(frozen=True)
class SearchPhase:
    """One search phase in plain values; its paths are visible to every node.

    Attributes:
        settings: Of the training, as far as they determine the distances.
        memory: Settings that only determine how much memory it takes.
    """

    model: str
    train_file: str
    settings: Mapping[str, Any]
    steps: int
    rate: float
    seed: int
    memory: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        model: str,
        train_file: str,
        settings: TrainSettings,
        seed: int,
        resolved: TrainSettings | None = None,
    ) -> SearchPhase | None:
        """Return the phase that a recipe needs; None if it needs none.

        Args:
            recipe: The recipe.
            model: Folder of the original model.
            train_file: Token set of the training text.
            settings: Of the training.
            seed: Of the candidate.
            resolved: The settings with what `activation_checkpointing: auto` comes to.
        """
        if FUSION_DISTANCES not in recipe.needs:
            return None
        knobs = recipe.knobs("objective")
        # One process: the phase is short, and the start of several workers costs more than it saves
        single = settings.identity() | {"num_workers": 1, "distillation": "none"}
        # What one of a trial's workers holds at once
        memory = {
            "micro_batch_size": settings.device_batch_size,
            "activation_checkpointing": (resolved or settings).activation_checkpointing,
        }
        steps, rate = int(knobs["steps"]), float(knobs["rate"])
        return cls(model, train_file, single, steps, rate, seed, memory)

    def file(self, cache: str | Path) -> Path:
        """Return the path of the distances, whether they are there or not."""
        local = Path(self.model).is_dir()
        weights = checkpoint.weights_digest(self.model, cache) if local else self.model
        text = Path(self.train_file).name
        parts = [weights, text, self.settings, self.steps, self.rate, self.seed]
        if self.settings.get("document_mask") or self.settings.get("assistant_only_loss"):
            parts.append("masked")  # files of earlier versions were measured without
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]
        return Path(cache) / f"fusion-distances-{digest}.safetensors"


def measure(
    model: Any,
    sequences: Tensor | TokenSequences,
    settings: TrainSettings,
    steps: int,
    rate: float,
    seed: int,
    loss_fn: LossFunction | None = None,
    device: torch.device | str = "cpu",
) -> Distances:
    """Run the search phase on `model` in this process.

    Args:
        model: The original model.
        sequences: Training text, `[N, T]`.
        settings: Of the training.
        steps: Its length.
        rate: Learning rate of the distances.
        seed: Of the training.
        loss_fn: Language modelling by default.
        device: What to compute on.
    """
    from trainers.fusion_search import search_distances
    from trainers.zero import computing_on

    with computing_on(device):
        by_side = search_distances(
            model, sequences, settings, steps=steps, rate=rate, seed=seed, loss_fn=loss_fn
        )
    return {side: distances.float().numpy() for side, distances in by_side.items()}


def read(file: str | Path) -> Distances:
    """Read the distances of `write`."""
    return load_file(str(file))


def prepare(phases: Iterable[SearchPhase], cache: str | Path, options: Mapping[str, Any]) -> None:
    """Measure what is not in the cache yet, as many at a time as the cluster has room for.

    Args:
        phases: The search phases.
        cache: The folder.
        options: Of the Ray tasks, as `ray.remote` takes them.
    """
    from orchestrator.cluster.ray_tasks import each_on_cluster

    missing = {phase.file(cache): phase for phase in phases if not phase.file(cache).exists()}
    calls = [(phase, str(file)) for file, phase in missing.items()]
    if calls:
        list(each_on_cluster(options, "search phases of DHA", _measure_to, calls, unit="phases"))


def _measure_to(phase: SearchPhase, file: str) -> None:
    """Run one search phase and write its distances. A Ray task."""
    from trainers.jobs.share import packed_text
    from trainers.losses import objective

    settings = TrainSettings.model_validate({**phase.settings, **phase.memory})
    torch.set_num_threads(settings.threads)
    model = checkpoints.load_model(phase.model, settings.dtype)
    sequences = read_sequences(phase.train_file)
    loss_fn = objective(**packed_text(settings, phase.model))
    distances = measure(
        model,
        sequences,
        settings,
        phase.steps,
        phase.rate,
        phase.seed,
        loss_fn,
        settings.shape.device,
    )
    write(distances, file)


def write(distances: Distances, file: str | Path) -> None:
    """Write distances so that no reader sees half a file."""
    with written_whole(file) as fresh:
        save_file(distances, str(fresh))
