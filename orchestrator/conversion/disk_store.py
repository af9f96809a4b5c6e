"""`headfold convert --layerwise`: a conversion that never holds more than one decoder layer of the checkpoint.

Legend: L layers, N sequences of T tokens, D model dim.

The hidden states of all calibration and held-out sequences, in the original and in the converted model, are carried
from layer to layer; each finished layer is written as a shard. Beside the result lies `.NAME.layerwise` until it is
complete (`orchestrator.conversion.layer_folder`). The same command run again goes on from there.
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

from attention.base.memory import freeze_garbage
from attention.base.timing import clock
from attention.conversion.refinement.refine import FitWork
from attention.io import checkpoint
from attention.io.layers.windows import LazyWeights, OutputHead, embed, stored_outer_names
from attention.io.replacing import check_folder, parents_made
from attention.io.shards import complete_checkpoint
from attention.modeling.model_classes import headfold_config
from attention.modeling.running import layer_batch
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.disk_planning import PlanByLayer
from orchestrator.conversion.execution import cost, steps_of_layers
from orchestrator.conversion.layer_folder import Stage, check_stage
from orchestrator.conversion.one_layer import LayerwiseConversion, score
from orchestrator.conversion.record import ConversionRecord
from orchestrator.conversion.request import ConversionRequest
from orchestrator.storage.outputs import Interrupted
from search_spaces.planning.budgets import counts_of
from search_spaces.planning.planner import site_generators
from search_spaces.recipes.recipe import AXES
from trainers.text.data import LoadedTexts

FORMAT = 3  # of what is kept on the way


def log_line(line: str) -> None:
    """The default progress: a line on stderr."""
    print(line, file=sys.stderr, flush=True)


def check_folder_of_layers(out: str | Path | None, *, overwrite: bool, source: str) -> Path:
    """The absolute path of `out`, if a conversion of `source` layer by layer can be written there.

    Raises ConfigError if it is None, OutputError for what may not be replaced.
    """
    if out is None:
        raise ConfigError("out: a conversion layer by layer is written layer by layer; give it a folder as out (--out)")
    place = check_folder(out, overwrite=overwrite, reads=[source])
    check_stage(stage_of(place))
    return place


def stage_of(out: Path) -> Path:
    """Where a conversion to `out` is kept until it is complete."""
    return out.with_name(f".{out.name}.layerwise")


@dataclass(frozen=True)
class LayerwiseJob:
    """One layerwise conversion, checked: the same plan and weights as in memory, and the same record, up to rounding.

    `out`: absolute; `progress`: takes lines for people. With `overwrite` finished layers of another conversion to `out`
    are given up.
    """

    request: ConversionRequest
    kv_ratio: float
    out: Path
    progress: Callable[[str], None]
    overwrite: bool

    def run(self, texts: LoadedTexts) -> ConversionRecord:
        """Convert, measure, write."""
        freeze_garbage()
        source = self.request.checkpoint.folder
        needed = self.request.recipe.needs & {"statistics", "sequences", "model"}
        used = texts.calibration if needed else texts.calibration[:0]
        tokens = torch.cat([used, texts.held_out])
        weights = LazyWeights(source, self.request.config)
        with parents_made(self.out):
            stage = self._stage(source, tokens, len(used))
            try:
                measured = self._carry_out(stage, self._work(stage, weights, used, tokens.shape[1]), tokens)
            except KeyboardInterrupt:
                raise Interrupted(stage.leave()) from None
            except Exception:
                self.progress(stage.leave())
                raise
        plan = stage.plan(self.request.geometry.head_dim)
        fits = [fit for layer in stage.layers for fit in layer["fits"]]
        spent = cost([*stage.planned, *(FitWork(**fit["work"]) for fit in fits)], self.request.phases)
        record = self.request.record(plan, self.kv_ratio, texts, measured, self.out)
        record.update(fits=fits, layerwise=True, cost=spent, seconds=dict(self.request.phases))
        return record

    def _carry_out(self, stage: Stage, work: LayerwiseConversion, tokens: Tensor) -> dict[str, Any]:
        """Go on from what the stage has, to the finished checkpoint. `tokens` `[N, T]`: calibration, then held out."""
        request, phases, weights = self.request, self.request.phases, work.weights
        held_out = tokens[work.calibration :]
        original, converted = self._layers(stage, work, tokens)
        with phases("evaluate"):
            kinds = request.config, request.working, work.device
            head, after = OutputHead(weights, *kinds), None
            if self._rounds(weights):
                after = OutputHead(weights.rounded(request.written), *kinds)
            scores = score(head, original[work.calibration :], converted[work.calibration :], held_out, after)
        del original, converted, head, after
        with phases("save"):
            stage.finish()
            form: dict[str, Any] = {"plain": work.plain, "dtype": request.written, "record": request.note()}
            plan = stage.plan(request.geometry.head_dim)
            sizes = complete_checkpoint(stage.result, weights, request.config, plan, **form)
            checkpoint.put_in_place(stage.result, self.out, overwrite=self.overwrite)
            shutil.rmtree(stage.folder, ignore_errors=True)
        return {
            **scores,
            "eval_tokens": len(held_out) * (held_out.shape[1] - 1),
            "cache_bytes_measured": sum(layer["cache_bytes"] for layer in stage.layers),
            "cache_tokens": tokens.shape[1],
            "parameters": sizes["parameters"],
        }

    def _layers(self, stage: Stage, work: LayerwiseConversion, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Convert all layers that are not done yet; the streams that leave the last one."""
        request, phases, layers = self.request, self.request.phases, self.request.geometry.num_layers
        if stage.reached:
            original, converted = stage.streams()
        else:
            with phases("load"):
                made_of = request.config, tokens, request.working, work.device, work.batch_size
                original = embed(work.weights, *made_of)
                converted = original.clone()
                if self._rounds(work.weights):
                    converted = embed(work.weights.rounded(request.written), *made_of)
        started, begun = time.perf_counter(), stage.reached
        for layer in range(begun, layers):
            done = work.convert(layer, original, converted)
            with phases("save"):
                stage.keep(done, original, converted, layers, phases)
            left = (time.perf_counter() - started) * (layers - layer - 1) / (layer + 1 - begun)
            errors = (f"{f['step']} {f['before']:.2e} -> {min(f['before'], f['after']):.2e}" for f in done.fits)
            self.progress(", ".join([f"layer {layer + 1}/{layers}", *errors, f"{clock(left)} left"]))
        return original, converted

    def _rounds(self, weights: LazyWeights) -> bool:
        """Whether what lies outside of the layers is rounded when it is written."""
        return not weights.holds_only(stored_outer_names(self.request.config), self.request.written)

    def _work(self, stage: Stage, weights: LazyWeights, used: Tensor, length: int) -> LayerwiseConversion:
        """What all layers share, their plan or head counts included. `used` `[C, T]`: calibration tokens."""
        request, recipe, geometry = self.request, self.request.recipe, self.request.geometry
        if stage.note:
            self.progress(stage.note)
        phases = request.phases
        phases.update({name: phases.get(name, 0.0) + spent for name, spent in stage.seconds.items()})
        batch = layer_batch(geometry.num_heads, length)
        generators, _ = site_generators(np.random.default_rng(request.seed), geometry.num_layers)
        budget = request.budget(self.kv_ratio)
        if "measure" in AXES["allocation"].get(recipe.allocation).needs:
            planner = PlanByLayer(request, weights, budget, stage, batch, self.progress)
            plan, increases = planner.plan(used)
            stage.planned = planner.work()
            plain = checkpoint.plain_form(headfold_config(request.config, plan), plan) is not None
            steps = steps_of_layers(recipe, geometry.num_layers, increases)
            return LayerwiseConversion(request, weights, plan, generators, len(used), plain, batch, steps)
        counts = counts_of(recipe, budget, geometry)
        # Known beforehand: any other plan is uniform by accident alone, and stays in Headfold's own form.
        one_count = recipe.together and recipe.equal_groups and len({c for pair in counts for c in pair}) == 1
        equal = one_count and geometry.num_kv_heads % counts[0][0] == 0
        plain = equal and self._has_plain(counts[0][0])
        steps = steps_of_layers(recipe, geometry.num_layers, None)
        return LayerwiseConversion(request, weights, counts, generators, len(used), plain, batch, steps)

    def _has_plain(self, kept: int) -> bool:
        """Whether the family has a plain form with `kept` KV heads in all layers."""
        geometry = self.request.geometry
        heads = geometry.num_heads
        if heads % kept:
            return False
        layer = LayerPlan(*[tuple(h * kept // heads for h in range(heads))] * 2)
        plan = AttentionPlan((layer,) * geometry.num_layers, geometry.head_dim)
        return checkpoint.plain_form(headfold_config(self.request.config, plan), plan) is not None

    def _stage(self, source: Path, tokens: Tensor, calibration: int) -> Stage:
        """The stage of all that the result depends on; weights stand by the sizes and times of their files."""
        files = [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(source.glob("*.safetensors"))]
        identity = {
            "format": FORMAT,
            "source": [str(source.absolute()), files],
            "recipe": self.request.recipe.to_dict(),
            "kv_ratio": self.kv_ratio,
            "settings": [self.request.seed, self.request.dtype],
            "tokens": [*tokens.shape, calibration, hashlib.sha256(tokens.numpy().tobytes()).hexdigest()],
        }
        return Stage.open(stage_of(self.out), identity, self.overwrite)
