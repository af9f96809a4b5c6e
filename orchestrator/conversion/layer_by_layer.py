"""`headfold convert --layerwise`: a conversion that never holds more than one decoder layer of the checkpoint.

Legend: L layers, N sequences of T tokens, D model dim.

The hidden states of all calibration and held-out sequences, in the original and in the converted model, are carried
from layer to layer; each finished layer is written as a shard. Beside the result lies `.NAME.layerwise` until it is
complete (`orchestrator.conversion.progress`). The same command run again goes on from there.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from attention import garbage
from attention.families import geometry_of
from attention.geometry import HeadGeometry
from attention.io import checkpoint
from attention.io.layer_models import Head, LazyWeights, embed, stored_outer_names
from attention.io.replacing import check_folder, parents_made
from attention.io.shards import complete
from attention.io.stock_files import GENERATION, TOKENIZER_FILES
from attention.io.stock_form import format_of
from attention.messages import reason
from attention.modeling.modeling import headfold_config, plan_of_config
from attention.plan import AttentionPlan, LayerPlan
from attention.ratios import own_heads, ratio_of
from orchestrator.config.schema import ConfigError
from orchestrator.conversion import loading
from orchestrator.conversion.limits import batch_size, check_layerwise
from orchestrator.conversion.one_layer import LayerwiseConversion, score
from orchestrator.conversion.progress import Stage, check_stage
from orchestrator.conversion.request import Inputs
from orchestrator.reporting.durations import clock
from orchestrator.storage.outputs import Interrupted
from search_spaces.planning.budgets import counts_of
from search_spaces.planning.planning import site_generators
from search_spaces.recipes.recipe import Recipe

FORMAT = 2  # of what is kept on the way; 1: ratios of multi-head attention, shards in the dtype of the work


def say(line: str) -> None:
    """The default progress: a line on stderr."""
    print(line, file=sys.stderr, flush=True)


def convert_layerwise(
    model: str | Path,
    recipe: str | Recipe,
    kv_ratio: float,
    out: str | Path | None,
    *,
    progress: Callable[[str], None] = say,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """`orchestrator.conversion.convert.convert_checkpoint`, layer by layer from disk to disk: the same plan and
    weights, and the same record, up to rounding. `settings` are those of `Inputs.check`.

    Raises ConfigError, DataError, PlanError or ValueError for what a user can mend, before any weight is read, and
    OutputError as `convert_checkpoint` does. With `overwrite` finished layers of another conversion to `out` are given
    up.
    """
    if out is None:
        raise ConfigError("out: a conversion layer by layer is written layer by layer; give it a folder with --out")
    place = check_folder(out, overwrite=overwrite, reads=[model])
    check_stage(stage_of(place))
    inputs = Inputs.check(model, recipe, [kv_ratio], **settings)
    config = checkpoint.load_config(inputs.model)
    check_layerwise(inputs.recipe, config)
    working = loading.dtype_of(loading.working_dtype(inputs.dtype, inputs.device))
    kinds = working, loading.dtype_of(inputs.dtype), loading.device_of(inputs.device)
    job = LayerwiseJob(inputs, float(kv_ratio), place, config, *kinds, overwrite)
    return job.run(*inputs.texts(), progress)


def stage_of(out: Path) -> Path:
    """Where a conversion to `out` is kept until it is complete."""
    return out.with_name(f".{out.name}.layerwise")


def local_folder(model: str) -> Path:
    """The folder of a checkpoint; a hub name is downloaded first. Raises ConfigError if that fails."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["*.safetensors", "*.json", *TOKENIZER_FILES, GENERATION]))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {model!r} cannot be fetched: {reason(error)}") from None


@dataclass(frozen=True)
class LayerwiseJob:
    """One layerwise conversion, checked. `config` is the checkpoint's; `out` absolute; `dtype`: what is computed in."""

    inputs: Inputs
    kv_ratio: float
    out: Path
    config: PretrainedConfig
    dtype: torch.dtype
    written: torch.dtype
    device: torch.device
    overwrite: bool

    @property
    def recipe(self) -> Recipe:
        return self.inputs.recipe

    @property
    def geometry(self) -> HeadGeometry:
        return geometry_of(self.config)

    def run(self, sequences: Tensor, held_out: Tensor, progress: Callable[[str], None]) -> dict[str, Any]:
        """Convert, measure, write. `sequences` and `held_out` `[., T]`: calibration and evaluation tokens."""
        garbage.settle()
        source = local_folder(self.inputs.model)
        weights = LazyWeights(source, self.config)
        used = sequences if self.recipe.needs & {"statistics", "sequences", "model"} else sequences[:0]
        tokens = torch.cat([used, held_out])
        work = self._work(weights, len(used), tokens.shape[1])
        with parents_made(self.out):
            stage = self._stage(source, tokens, len(used))
            try:
                record = self._carry_out(stage, work, tokens, len(used), progress)
                return record | {"calibration_tokens": int(sequences.numel())}
            except KeyboardInterrupt:
                raise Interrupted(stage.leave()) from None
            except Exception:
                progress(stage.leave())
                raise

    def _carry_out(
        self, stage: Stage, work: LayerwiseConversion, tokens: Tensor, calibration: int, progress: Callable[[str], None]
    ) -> dict[str, Any]:
        """Go on from what the stage has. The first `calibration` of `tokens` `[N, T]` are no evaluation tokens."""
        phases, held_out = self.inputs.phases, tokens[calibration:]
        if stage.note:
            progress(stage.note)
        phases.update({name: phases.get(name, 0.0) + spent for name, spent in stage.seconds.items()})
        original, converted = self._layers(stage, work, tokens, progress)
        with phases("evaluate"):
            head, weights = Head(work.weights, self.config, self.dtype, self.device), work.weights
            after = self._rounds(weights) and Head(weights.rounded(self.written), self.config, self.dtype, self.device)
            scores = score(head, original[calibration:], converted[calibration:], held_out, after or None)
        del original, converted, head, after
        plan = stage.plan(self.geometry.head_dim)
        own = own_heads(self.geometry)
        about = {"recipe": self.recipe.to_dict(), "seed": self.inputs.seed, **checkpoint.original_note(own)}
        with phases("save"):
            form: dict[str, Any] = {"plain": work.plain, "dtype": self.written}
            stage.finish()
            sizes = complete(stage.result, work.weights, self.config, plan, record=about, **form)
            checkpoint.put_in_place(stage.result, self.out, overwrite=self.overwrite)
            shutil.rmtree(stage.folder, ignore_errors=True)
        return {
            "model": self.inputs.model,
            **scores,
            "loss_increase": scores["loss"] - scores["original_loss"],
            "eval_tokens": len(held_out) * (held_out.shape[1] - 1),
            "kv_ratio": ratio_of(plan, own),
            "kv_bytes_per_token": plan.kv_bytes_per_token(self.written),
            "kv_bytes_per_token_original": plan_of_config(self.config).kv_bytes_per_token(self.written),
            "cache_bytes_measured": sum(layer["cache_bytes"] for layer in stage.layers),
            "cache_tokens": stage.layers[0]["cache_tokens"],
            "parameters": sizes["parameters"],
            "kv_ratio_asked": self.kv_ratio,
            "recipe": self.recipe.to_dict(),
            "plan": plan.to_dict(),
            "plan_digest": plan.digest,
            "seed": self.inputs.seed,
            "dtype": self.inputs.dtype,
            "fits": [fit for layer in stage.layers for fit in layer["fits"]],
            "layerwise": True,
            "peak_memory": loading.memory_peak(),
            **format_of(self.out, self.inputs.dtype),
            "out": str(self.out),
            "seconds": dict(phases),
        }

    def _layers(
        self, stage: Stage, work: LayerwiseConversion, tokens: Tensor, progress: Callable[[str], None]
    ) -> tuple[Tensor, Tensor]:
        """Convert all layers that are not done yet; the streams that leave the last one."""
        phases, layers = self.inputs.phases, self.geometry.num_layers
        if stage.reached:
            original, converted = stage.streams()
        else:
            with phases("load"):
                original = embed(work.weights, self.config, tokens, self.dtype, self.device, work.batch_size)
                converted = original.clone()
                if self._rounds(work.weights):
                    rounded, made_of = work.weights.rounded(self.written), (self.dtype, self.device, work.batch_size)
                    converted = embed(rounded, self.config, tokens, *made_of)
        started, begun = time.perf_counter(), stage.reached
        for layer in range(begun, layers):
            done = work.convert(layer, original, converted, phases)
            with phases("save"):
                stage.keep(done, original, converted, layers, phases)
            left = (time.perf_counter() - started) * (layers - layer - 1) / (layer + 1 - begun)
            errors = (f"{f['step']} {f['before']:.2e} -> {min(f['before'], f['after']):.2e}" for f in done.fits)
            progress(", ".join([f"layer {layer + 1}/{layers}", *errors, f"{clock(left)} left"]))
        return original, converted

    def _rounds(self, weights: LazyWeights) -> bool:
        """Whether what lies outside of the layers is rounded when it is written."""
        return not weights.holds_only(stored_outer_names(self.config), self.written)

    def _work(self, weights: LazyWeights, calibration: int, length: int) -> LayerwiseConversion:
        counts = counts_of(self.recipe, self.kv_ratio, self.geometry)
        generators, _ = site_generators(np.random.default_rng(self.inputs.seed), self.geometry.num_layers)
        # Known beforehand: any other plan is uniform by accident alone, and stays in Headfold's own form.
        equal = self.recipe.together and self.recipe.equal_groups and len({c for pair in counts for c in pair}) == 1
        return LayerwiseConversion(
            weights,
            self.config,
            self.recipe,
            counts,
            generators,
            calibration,
            plain=equal and self._has_plain(counts[0][0]),
            dtype=self.dtype,
            written=self.written,
            device=self.device,
            batch_size=batch_size(self.geometry.num_heads, length),
        )

    def _has_plain(self, kept: int) -> bool:
        """Whether the family has a plain form with `kept` KV heads in all layers."""
        heads = self.geometry.num_heads
        if heads % kept:
            return False
        layer = LayerPlan(*[tuple(h * kept // heads for h in range(heads))] * 2)
        plan = AttentionPlan((layer,) * self.geometry.num_layers, self.geometry.head_dim)
        return checkpoint.plain_form(headfold_config(self.config, plan), plan) is not None

    def _stage(self, source: Path, tokens: Tensor, calibration: int) -> Stage:
        """The stage of all that the result depends on; weights stand by the sizes and times of their files."""
        files = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(source.glob("*.safetensors"))]
        identity = {
            "format": FORMAT,
            "source": [str(source.absolute()), files],
            "recipe": self.recipe.to_dict(),
            "kv_ratio": self.kv_ratio,
            "settings": [self.inputs.seed, self.inputs.dtype],
            "tokens": [*tokens.shape, calibration, hashlib.sha256(tokens.numpy().tobytes()).hexdigest()],
        }
        return Stage.open(stage_of(self.out), identity, self.overwrite)
