"""A conversion from disk to disk with one decoder layer in memory at a time (`--layerwise`).

Legend: N sequences of T tokens, the first C of them for calibration, the others for the held-out
loss; D model dim.

The hidden states of all sequences, in the original and in the converted model, are carried from
layer to layer, and each finished layer is written as a shard. Until the result is complete, its
state is in `.NAME.layerwise` next to it (`orchestrator.conversion.layer_folder`); the same command
run again resumes from there.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from attention.base.memory import freeze_garbage, release_memory
from attention.base.timing import clock
from attention.calibration.calibrate import calibrate
from attention.calibration.sizes import stored_tokens
from attention.conversion.convert import lift
from attention.families import geometry_of
from attention.io import checkpoint
from attention.io.experts import published
from attention.io.layers.windows import (
    LazyWeights,
    OutputHead,
    advance,
    feed,
    layer_prefix,
    of_layer,
    rows_of,
    stored_outer_names,
)
from attention.io.precision import cast_weights, round_weights
from attention.io.replacing import check_folder, parents_made
from attention.io.shards import complete_checkpoint
from attention.modeling.grouped import cache_bytes
from attention.modeling.growing_cache import cache_of
from attention.modeling.model_classes import headfold_config
from attention.modeling.predictions import in_chunks, positions_at_once
from attention.plan import AttentionPlan, LayerPlan, layer_record
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.disk_planning import plan_by_curves
from orchestrator.conversion.execution import refine_with, steps_of_layers
from orchestrator.conversion.layer_folder import (
    LayerFolder,
    LayerRecord,
    StreamPair,
    check_layer_folder,
)
from orchestrator.conversion.layer_source import LayerSource
from orchestrator.conversion.layer_store import LayerPlans, LayerStore
from orchestrator.conversion.record import ConversionRecord, FitRecord
from orchestrator.conversion.request import ConversionRequest
from orchestrator.storage.outputs import Interrupted
from search_spaces.planning.budgets import counts_of
from search_spaces.planning.by_layer import plan_layer
from search_spaces.planning.context import PlanningContext, convert_with
from search_spaces.planning.planner import site_generators
from search_spaces.planning.widths import with_width
from trainers.evaluation import PredictionCosts, comparison

_FORMAT = 4  # of the layer folder


def log_line(line: str) -> None:
    """Print a line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def check_output_folder(out: str | Path | None, *, overwrite: bool, source: str) -> Path:
    """Return the absolute path of `out`, if `source` can be converted to it layer by layer.

    Raises:
        ConfigError: If it is None.
        OutputError: For what may not be replaced.
    """
    if out is None:
        raise ConfigError(
            "out: a conversion layer by layer is written layer by layer; give it a folder as out "
            "(--out)"
        )
    path = check_folder(out, overwrite=overwrite, reads=[source])
    check_layer_folder(layer_folder_of(path))
    return path


def layer_folder_of(out: Path) -> Path:
    """Return the folder of a conversion to `out` until it is complete."""
    return out.with_name(f".{out.name}.layerwise")


class DiskStore(LayerStore[LayerFolder]):
    """A checkpoint on disk, converted to the same plan, weights and record as in memory.

    They are the same up to rounding.

    Attributes:
        source: The checkpoint, a layer at a time.
        calibration: C.
        tokens: Calibration, then held-out tokens, `[N, T]`.
        folder: What the present conversion has finished.
        generators: Of its plan, two per layer.
        plain: Whether its layers are written in the plain family's form.
        fit_steps: Of the local fit of each of its layers.
    """

    folder: LayerFolder
    generators: list[np.random.Generator]
    plain: bool
    fit_steps: list[int] | None

    def __init__(self, request: ConversionRequest, log: Callable[[str], None] = log_line) -> None:
        """Read the texts of a request; `log` takes lines of progress.

        Raises:
            DataError: For its texts.
        """
        super().__init__(request, request.texts())
        freeze_garbage()
        self.calibration = len(self.texts.calibration) if request.recipe.reads_text else 0
        used = self.texts.calibration[: self.calibration]
        self.tokens = torch.cat([used, self.texts.held_out])
        self.source = LayerSource(request, self.tokens.shape[1], log)

    def run(
        self, kv_ratio: float, out: Path | None = None, *, overwrite: bool = False
    ) -> ConversionRecord:
        out = check_output_folder(out, overwrite=overwrite, source=self.request.model)
        record = super().run(kv_ratio, out, overwrite=overwrite)
        fits = [fit for layer in self.folder.layers for fit in layer["fits"]]
        record.update(fits=fits, layerwise=True)
        return record

    @contextmanager
    def opened(self, kv_ratio: float, out: Path | None, overwrite: bool) -> Iterator[None]:
        """Open the layer folder next to `out`, and report its state if the body fails."""
        assert out is not None  # see `run`
        with parents_made(out):
            identity = self._identity(kv_ratio)
            self.folder = LayerFolder.open(layer_folder_of(out), identity, overwrite)
            for name, seconds in self.folder.seconds.items():
                self.phases[name] = self.phases.get(name, 0.0) + seconds
            self.source.phases = self.phases
            try:
                if self.folder.note:
                    self.source.log(self.folder.note)
                yield
            except KeyboardInterrupt:
                raise Interrupted(self.folder.leave()) from None
            except Exception:
                self.source.log(self.folder.leave())
                raise

    def _identity(self, kv_ratio: float) -> Mapping[str, Any]:
        """Return all that the result depends on; sizes and times of files stand for weights."""
        request = self.request
        folder = request.checkpoint.folder
        files = [
            [path.name, path.stat().st_size, path.stat().st_mtime_ns]
            for path in sorted(folder.glob("*.safetensors"))
        ]
        digest = hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()
        return {
            "format": _FORMAT,
            "source": [str(folder.absolute()), files],
            "recipe": request.recipe.to_dict(),
            "kv_ratio": kv_ratio,
            "settings": [request.seed, request.dtype],
            "tokens": [*self.tokens.shape, self.calibration, digest],
        }

    def plan(self, budget: Fraction) -> LayerPlans:
        recipe = self.request.recipe
        geometry = self.request.geometry
        increases = None
        if recipe.measures_increases:
            calibration = self.tokens[: self.calibration]
            plans, increases, work = plan_by_curves(self.source, self.folder, budget, calibration)
            self.work += work
        else:
            plans = counts_of(recipe, budget, geometry)
        layers = geometry.num_layers
        self.generators, _ = site_generators(np.random.default_rng(self.request.seed), layers)
        self.fit_steps = steps_of_layers(recipe, layers, increases)
        self.plain = self._is_plain(plans)
        return plans

    def convert(self, plans: LayerPlans) -> tuple[AttentionPlan, LayerFolder]:
        """Convert the layers that are not finished yet, one after the other."""
        folder = self.folder
        layers = self.request.geometry.num_layers
        each = plans.layers if isinstance(plans, AttentionPlan) else plans
        streams = folder.streams() if folder.reached else self._embed()
        started = time.perf_counter()
        begun = folder.reached
        for layer in range(begun, layers):
            record, tensors = self.convert_layer(layer, each[layer], streams)
            with self.phases("save"):
                folder.add(record, tensors, streams, layers, self.phases)
            left = (time.perf_counter() - started) * (layers - layer - 1) / (layer + 1 - begun)
            errors = (
                f"{fit['step']} {fit['before']:.2e} -> {min(fit['before'], fit['after']):.2e}"
                for fit in record["fits"]
            )
            line = [f"layer {layer + 1}/{layers}", *errors, f"{clock(left)} left"]
            self.source.log(", ".join(line))
        self.work += folder.work
        return folder.plan(self.request.geometry.head_dim), folder

    def _embed(self) -> StreamPair:
        with self.phases("load"):
            original = self.source.embed(self.tokens)
            if not self._rounds:
                return StreamPair(original, original.clone())
            return StreamPair(original, self.source.embed(self.tokens, self._rounded_weights))

    @cached_property
    def _rounds(self) -> bool:
        """Whether weights outside of the layers are rounded when they are written."""
        request = self.request
        names = stored_outer_names(request.config)
        return not self.source.weights.holds_only(names, request.written)

    @property
    def _rounded_weights(self) -> LazyWeights:
        return self.source.weights.rounded(self.request.written)

    def _is_plain(self, plans: LayerPlans) -> bool:
        """Whether layers are written in the plain family's form.

        It must be known beforehand: where layers are grouped one by one, any plan but those of one
        count for all is uniform by accident alone, and stays in Headfold's own form.
        """
        geometry = self.request.geometry
        heads = geometry.num_heads
        if not isinstance(plans, AttentionPlan):
            counts = {each for pair in plans for each in pair}
            count = plans[0][0]
            ratio = Fraction(count, geometry.num_kv_heads)
            recipe = with_width(self.request.recipe, ratio, geometry)
            width = int(recipe.width)
            one_count = recipe.together and recipe.equal_groups and len(counts) == 1
            groups = count // width
            if not one_count or geometry.num_kv_heads % groups or heads % groups:
                return False
            head_map = tuple(head * groups // heads for head in range(heads))
            layer = LayerPlan(head_map, head_map, width, width)
            plans = AttentionPlan((layer,) * geometry.num_layers, geometry.head_dim)
        config = headfold_config(self.request.config, plans)
        return checkpoint.plain_form(config, plans) is not None

    def convert_layer(
        self, layer: int, plan: LayerPlan | tuple[int, int], streams: StreamPair
    ) -> tuple[LayerRecord, Mapping[str, Tensor]]:
        """Convert one layer, and return its record and its weights by name in the whole model.

        The streams enter the layer, and are changed in place to what leaves it.
        """
        request = self.request
        source = self.source
        fit_steps = None if self.fit_steps is None else [self.fit_steps[layer]]
        with source.phase("load", layer, "reading weights"):
            window = source.window(layer, streams.original)
        rows = rows_of(streams.original, self.calibration)
        new, plan = self._plan_and_fuse(layer, plan, window, rows)
        feed(new, streams.converted)
        with source.phase("refine", layer, "refining"):
            fits = refine_with(
                request.recipe, window, new, rows, first=layer, layer_steps=fit_steps
            )
        round_weights(new, request.written)  # before the converted stream runs through
        with source.phase("carry on", layer, "running both models"):
            advance(window, streams.original, source.batch_size)
            del window
            advance(new, streams.converted, source.batch_size)
        cast_weights(new, request.written)
        record: Any = layer_record(plan) | {
            "fits": [cast("FitRecord", asdict(fit)) for fit in fits],
            "cache_bytes": _cache_bytes(new, rows_of(streams.converted, 1)),
        }
        with source.phase("save", layer, "writing"):
            tensors = _layer_tensors(new, layer, self.plain)
        del new
        release_memory()  # a window and the hooks that feed it refer to each other
        return cast("LayerRecord", record), tensors

    def _plan_and_fuse(
        self,
        layer: int,
        plan: LayerPlan | tuple[int, int],
        window: PreTrainedModel,
        rows: Tensor,
    ) -> tuple[PreTrainedModel, LayerPlan]:
        recipe = self.request.recipe
        source = self.source
        calibration = None
        if "statistics" in recipe.needs:
            with source.phase("calibrate", layer, "calibrating"):
                sampled = stored_tokens(rows.shape[1]) if "inputs" in recipe.needs else 0
                calibration = calibrate(
                    window, rows, sample_tokens=sampled, batch_size=source.batch_size
                )
        geometry = geometry_of(window.config)
        release_memory()
        if not isinstance(plan, LayerPlan):
            with source.phase("plan", layer, "grouping heads"):
                context = PlanningContext(geometry, lift(window), calibration, window, rows)
                sites = self.generators[2 * layer : 2 * layer + 2]
                plan = plan_layer(recipe, plan, context, sites)
                del context
                # An objective and the site that it judges refer to each other, and hold the
                # layer's Gram matrices.
                release_memory()
        # All weights of the new window are copied or written, so none need be drawn first.
        with source.phase("convert", layer, "fusing heads"), no_init_weights():
            window_plan = AttentionPlan((plan,), geometry.head_dim)
            new = convert_with(recipe, window, window_plan, calibration)
        return new.requires_grad_(False), plan

    def measure(self, layers: LayerFolder) -> Mapping[str, Any]:
        request = self.request
        source = self.source
        held_out = self.tokens[self.calibration :]
        with self.phases("evaluate"):
            kinds = (request.config, request.working, source.device)
            head = OutputHead(source.weights, *kinds)
            rounded = OutputHead(self._rounded_weights, *kinds) if self._rounds else head
            original, converted = (stream[self.calibration :] for stream in layers.streams())
            losses = held_out_losses(head, rounded, StreamPair(original, converted), held_out)
        return {
            **losses,
            "eval_tokens": len(held_out) * (held_out.shape[1] - 1),
            "cache_bytes_measured": sum(layer["cache_bytes"] for layer in layers.layers),
            "cache_tokens": self.tokens.shape[1],
        }

    def write(
        self, plan: AttentionPlan, layers: LayerFolder, out: Path, overwrite: bool
    ) -> Mapping[str, Any]:
        request = self.request
        with self.phases("save"):
            layers.finish()
            sizes = complete_checkpoint(
                layers.result,
                self.source.weights,
                request.config,
                plan,
                plain=self.plain,
                dtype=request.written,
                record=request.note(),
            )
            checkpoint.put_in_place(layers.result, out, overwrite=overwrite)
            shutil.rmtree(layers.folder, ignore_errors=True)
        return {"parameters": sizes["parameters"]}


@torch.no_grad()
def _cache_bytes(model: PreTrainedModel, rows: Tensor) -> int:
    return cache_bytes(cache_of(model(rows.to(model.device), use_cache=True)))


def _layer_tensors(new: PreTrainedModel, layer: int, plain: bool) -> dict[str, Tensor]:
    """Return the weights of a converted window by their names in the whole model."""
    if plain:
        with no_init_weights():
            new = checkpoint.to_plain(new)
    prefix = layer_prefix(new)
    tensors = {name: tensor for name, tensor in new.state_dict().items() if name.startswith(prefix)}
    return {
        of_layer(name, prefix, layer): tensor for name, tensor in published(new, tensors).items()
    }


@torch.no_grad()
def held_out_losses(
    original_head: OutputHead, converted_head: OutputHead, streams: StreamPair, tokens: Tensor
) -> Mapping[str, Any]:
    """Return held-out losses and KL in nats per token, summed in float64 as in `evaluate`.

    Args:
        original_head: The modules above the last layer of the original.
        converted_head: The same of the converted model.
        streams: What leaves the last layers.
        tokens: `[N, T]`.
    """
    divergence = 0.0
    original_costs = PredictionCosts()
    costs = PredictionCosts()
    at_once = max(1, positions_at_once(original_head.vocabulary) // tokens.shape[1])
    for rows in torch.arange(len(tokens)).split(at_once):
        ids = tokens[rows].long().to(original_head.device)
        before = original_head.final(streams.original[rows])
        after = converted_head.final(streams.converted[rows])

        def both(logits: Tensor, labels: Tensor, expected: Tensor | None) -> Tensor:
            assert expected is not None  # the original's logits are always there
            original_costs(expected, labels, None)
            return costs(logits, labels, expected)

        share = len(rows) / len(tokens)
        divergence += float(in_chunks(after, ids, both, before)[1]) * share
    original_losses = original_costs.of_rows(len(tokens))
    losses = costs.of_rows(len(tokens))
    original_loss = float(original_losses.mean())
    loss = float(losses.mean())
    compared = comparison(loss, original_loss, losses, original_losses)
    return {"original_loss": original_loss, "loss": loss, "kl": divergence, **compared}
