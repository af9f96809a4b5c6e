"""A checkpoint: opened once from a folder or a hub name, then handed down."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from attention import families
from attention.geometry import HeadGeometry
from attention.io import checkpoint, weights
from attention.io.precision import own_dtype
from attention.io.sources import check_source, fetched, source_name
from attention.io.stock_files import GENERATION, TOKENIZER_FILES
from attention.io.tokenizers import read_tokenizer
from attention.modeling.model_classes import check_fits, plan_of_config
from attention.plan import AttentionPlan
from attention.ratios import own_heads


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A local folder or a model of the hub, and its config, which is read once (`open`).

    Properties derived from the two are computed at first use and cached. Only `load` reads weights.

    Attributes:
        path: The folder or hub name.
        config: Its config, which belongs to all who hold the checkpoint: copy it before you
            change it.
    """

    path: str
    config: PretrainedConfig

    @classmethod
    def open(cls, source: str | Path | Checkpoint, key: str = "model") -> Checkpoint:
        """Read the config of a checkpoint; one that is open already is returned as it is.

        Raises:
            TypeError: If `source` is no name of a checkpoint. `key` is what the user knows it by.
            CheckpointError: If nothing is there, or its config cannot be used.
        """
        if isinstance(source, Checkpoint):
            return source
        check_source(source, key)
        return cls(str(source), checkpoint.load_config(source))

    def __reduce__(self) -> Any:
        """Send path and config to other processes, and nothing that follows from them."""
        return Checkpoint, (self.path, self.config)

    def __str__(self) -> str:
        return self.path

    @cached_property
    def geometry(self) -> HeadGeometry:
        """Layers, heads and dims. Raises ValueError for an unsupported family."""
        return families.geometry_of(self.config)

    @cached_property
    def plan(self) -> AttentionPlan:
        """Which heads share a key and a value head.

        Raises:
            PlanError: For a config of Headfold's own format that has lost it.
        """
        return plan_of_config(self.config)

    @property
    def own_heads(self) -> int:
        """Key heads plus value heads of the model as its family has them, over all layers."""
        return own_heads(self.geometry)

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the stored weights. Raises DtypeError if it is not known."""
        return own_dtype(self.config, self.path)

    @property
    def name(self) -> str:
        """The name of the checkpoint in records: the source of a plain copy, else its path."""
        return source_name(self.path)

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer. Raises TokenizerError if it has none."""
        return read_tokenizer(self.path, self.config)

    @cached_property
    def folder(self) -> Path:
        """The local folder of its files; those of a hub model are fetched.

        Raises:
            CheckpointError: If that fails.
        """
        return fetched(
            self.path, ["*.safetensors", "*.json", *TOKENIZER_FILES, GENERATION], "files"
        )

    def check(self, *, weights: bool = True) -> None:
        """Check the family, the plan, and that weights in plain numbers are there.

        Args:
            weights: Whether weights have to be there. Headers of files are read at most, and once.

        Raises:
            ValueError: For what does not hold.
        """
        check_fits(self.plan, self.geometry)
        if weights:
            self._check_weights_once  # noqa: B018
        else:
            self._plain  # noqa: B018

    @cached_property
    def _plain(self) -> None:
        weights.check_plain(self.path, self.config)

    @cached_property
    def _check_weights_once(self) -> None:
        weights.check_weights(self.path, self.config)

    def load(
        self, dtype: torch.dtype | str | None = None, device: torch.device | str = "cpu"
    ) -> PreTrainedModel:
        """Load the model in evaluation mode, without gradients. `dtype` None is the stored one.

        Raises:
            WeightsError: For weights that are not those of the config, or not finite.
        """
        model: Any = checkpoint.load(self.path, dtype, config=self.config)
        model = model.to(device)
        weights.check_finite(self.path, dict(model.named_parameters()))
        return model.requires_grad_(False)
