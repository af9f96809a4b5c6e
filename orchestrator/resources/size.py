"""Size of a checkpoint, and the bytes of each thing in a conversion's memory.

Legend: L layers, H query heads, d head dim, D model dim, e = D + 1, V vocabulary, C calibration
tokens, E held-out tokens, N = C + E, b bytes of a weight in computation (4 on the CPU), T tokens
per sequence, B sequences per batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PretrainedConfig

from attention.calibration.collecting import SLICE_BYTES
from attention.calibration.sizes import Mixed, layer_bytes, sum_bytes
from attention.conversion.refinement.local import FIT_TOKENS
from attention.conversion.refinement.original import bytes_to_keep
from attention.conversion.sensitivity import SENSITIVITY_BATCH
from attention.families import family_of, geometry_of
from attention.geometry import HeadGeometry
from attention.io.layers.windows import empty, layer_prefix, window_config
from attention.modeling.predictions import most_logit_bytes
from attention.modeling.running import batch_of, layer_batch
from orchestrator.config.schema import SearchConfig
from search_spaces.planning.widths import with_width
from search_spaces.recipes.recipe import AXES, Recipe
from search_spaces.site import FUSION_DISTANCES
from trainers.adapters import adaptable
from trainers.evaluation import TEACHER_BYTES
from trainers.freezing import key_value_parameters
from trainers.polish import PolishWeights, polish_rows
from trainers.search_phase import search_phase_settings
from trainers.settings import TrainSettings

FLOAT, DOUBLE = 4, 8
# Of the float32 attention layer in a local fit: itself, start, best, gradient, two moments, spare
ADAM_COPIES = 7
# Libraries that read and split texts: at work, and what stays of them
READING = 270 * 2**20
READ = 110 * 2**20
SPARE = 0.9  # share of the available memory that a conversion may plan with
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Size:
    """Numbers (not bytes) of parameters of a checkpoint.

    Attributes:
        attention: Of one attention module.
        layer: Of one decoder layer.
        active: Of those of a layer that a token passes (some of the experts).
        embedding: Of the embedding matrix.
        outer: Of all outside of the layers.
        total: Of all.
    """

    attention: int
    layer: int
    active: int
    embedding: int
    outer: int
    total: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Size:
        """Count on a model of one layer without storage. Raises ValueError for a foreign family."""
        with torch.device("meta"):
            model = empty(
                window_config(config, 0, config.vocab_size), torch.float32, torch.device("meta")
            )
        family, prefix = family_of(config), layer_prefix(model)
        attention = _numbers(family.attention_modules(model)[0])
        layer_parameters = {
            name: p.numel() for name, p in model.named_parameters() if name.startswith(prefix)
        }
        layer = sum(layer_parameters.values())
        experts = sum(size for name, size in layer_parameters.items() if ".experts." in name)
        number = (
            getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
        )
        names = ("num_experts_per_tok", "top_k_experts")
        used = next((count for name in names if (count := getattr(config, name, None))), 1)
        active = layer - experts + experts * used // number
        embedding = cast(torch.Tensor, model.get_input_embeddings().weight).numel()
        layers = geometry_of(config).num_layers
        outer = _numbers(model) - layer - (embedding if config.tie_word_embeddings else 0)
        if geometry_of(config).decoder_layers is not None:  # with layers that are not converted
            with torch.device("meta"):
                outer = _numbers(empty(config, torch.float32, torch.device("meta")))
            outer -= layers * layer
        return cls(attention, layer, active, embedding, outer, outer + layers * layer)


@dataclass(frozen=True)
class Conversion:
    """Everything that the formulas of a conversion's estimate read.

    `kv_ratio`: of the checkpoint's KV cache; `dtype`: of the written files, `working`: of the
    computation; `mixed`: how the mixed moments are stored; `in_files`: whether the statistics are
    in files, of which one layer at a time is mapped.
    """

    config: PretrainedConfig
    recipe: Recipe
    kv_ratio: float
    calibration_tokens: int
    eval_tokens: int
    sequence_length: int
    dtype: torch.dtype
    working: torch.dtype = torch.float32
    mixed: Mixed = "float32"
    in_files: bool = False
    polish_steps: int = 0
    polish_weights: PolishWeights = "kv"

    @property
    def geometry(self) -> HeadGeometry:
        return geometry_of(self.config)

    @property
    def width(self) -> int:
        """The width of the KV heads as a multiple of that of the checkpoint's heads."""
        return int(with_width(self.recipe, self.kv_ratio, self.geometry).width)

    @property
    def features(self) -> int:
        """The inputs of a layer's output projection, numbers per token."""
        g = self.geometry
        return g.num_heads * g.head_dim * self.width

    @property
    def added(self) -> int:
        """Weights that wide heads add to the query and output projections of a layer."""
        g = self.geometry
        sides = 1 if g.qk_norm else 2
        return sides * (self.width - 1) * g.num_heads * g.head_dim * g.hidden_size

    @property
    def used_tokens(self) -> int:
        """Calibration tokens that the recipe looks at."""
        return self.calibration_tokens if self.recipe.reads_text else 0

    def statistics(self) -> int:
        """Bytes of one layer's statistics."""
        if "statistics" not in self.recipe.needs:
            return 0
        return layer_bytes(self.geometry, self.sampled_tokens, self.mixed, self.sequence_length)

    @property
    def sampled_tokens(self) -> int:
        """Tokens whose inputs are stored with the moments; files store them for later readers."""
        return self.used_tokens if self.in_files or "inputs" in self.recipe.needs else 0

    def sums(self) -> int:
        """Bytes of one layer's mixed moments while they are summed, as whole matrices."""
        return sum_bytes(self.geometry, self.mixed) if self.statistics() else 0

    def calibrating(self) -> int:
        """Return the bytes of a calibration pass in addition to the statistics.

        Float32 queries, one batch of activations and of its attention weights a slice.
        """
        if "statistics" not in self.recipe.needs:
            return 0
        g, length = self.geometry, self.sequence_length
        batch = layer_batch(g.num_heads, length)
        scores = 3 * min(SLICE_BYTES, FLOAT * batch * length**2)
        # x~ and its mixture, and the product of either with itself before it is added
        wide = g.hidden_size + 1
        return self.heads() // 4 + scores + FLOAT * (4 * batch * length * wide + wide**2)

    def heads(self) -> int:
        """Bytes of one layer's lifted heads in float32."""
        g = self.geometry
        return FLOAT * 4 * g.num_heads * g.head_dim * g.hidden_size

    def fusing(self) -> int:
        """Return the bytes of the Gram matrices of a layer's grouping and fusion (float64)."""
        if "statistics" not in self.recipe.needs:
            return 0
        g, parts = self.geometry, (self.recipe.fusion, self.recipe.alignment)
        # Rows of keys, queries and values, and their products with a moment.
        count = 4 * DOUBLE * g.num_heads * g.head_dim * (g.hidden_size + 1)
        if g.rotary.free:
            count += 2 * DOUBLE * (g.num_heads * len(g.rotary.free)) ** 2
        if self.recipe.objective == "least_squares":
            # Grams of all KV heads under each query head's weights, in float32; by estimates it is
            # less.
            count += FLOAT * g.num_heads * (g.num_kv_heads * g.head_dim) ** 2
        # Fusion makes them for one group after the other, here for the largest of equal groups.
        members = math.ceil(1 / self.kv_ratio - 1e-9) if "least_squares" in parts else 0
        return (
            count
            + 3 * DOUBLE * members * g.num_heads // g.num_kv_heads * (members * g.head_dim) ** 2
        )

    @property
    def planned_on(self) -> int:
        """Tokens on which a plan of all layers measures how much outputs matter, else 0."""
        if not self.recipe.measures_increases:
            return 0
        return min(
            self.used_tokens, max(self.recipe.knobs("allocation")["tokens"], self.sequence_length)
        )

    @cached_property
    def search_phase(self) -> TrainSettings | None:
        """The training of DHA's search phase; None for a recipe that has none."""
        if FUSION_DISTANCES not in self.recipe.needs:
            return None
        length = self.sequence_length
        return search_phase_settings(max(1, self.calibration_tokens // length), length)

    @property
    def search_phase_tokens(self) -> int:
        """Tokens that DHA's search phase trains on."""
        if self.search_phase is None:
            return 0
        steps = self.recipe.knobs("objective")["steps"]
        return steps * self.search_phase.batch_size * self.sequence_length

    def plan_files(self, width: int) -> int:
        """Return the bytes of scratch files of a plan of all layers.

        Metrics and inputs of the layers, and the gradients of two of them.
        """
        g, planned = self.geometry, self.planned_on
        if not planned:
            return 0
        layers = g.num_layers * (FLOAT * g.hidden_size + width * planned)
        return g.hidden_size * (layers + 2 * FLOAT * planned)

    def gradients(self, size: Size) -> int:
        """Return the bytes that a pass through one layer stores for its backward pass.

        The outputs of its products, for a batch, and its attention weights.
        """
        g = self.geometry
        rows = batch_of(self.sequence_length, SENSITIVITY_BATCH) * self.sequence_length
        return (
            FLOAT
            * rows
            * (2 * size.layer // g.hidden_size + 3 * g.num_heads * self.sequence_length)
        )

    def recorded(self) -> int:
        """Return the bytes of the original layers' outputs on the calibration tokens, in memory."""
        if not (
            self.planned_on or "sequences" in AXES["refinement"].get(self.recipe.refinement).needs
        ):
            return 0
        g = self.geometry
        return bytes_to_keep(g.num_layers, self.used_tokens, g.hidden_size, self.working.itemsize)

    def refining(self, size: Size, layers_at_once: int = 1) -> int:
        """Return the bytes of local fits of `layers_at_once` layers, or of a larger ridge refit."""
        g = self.geometry
        features = self.features
        if "heal" not in self.recipe.refinement:
            return 0
        heal = (
            DOUBLE * (5 * features**2 + 4 * features * g.hidden_size)
            + FLOAT * self.used_tokens * features
        )
        if self.recipe.refinement != "fit_heal":
            return heal
        return max(
            heal, self.fitting(size, layers_at_once, self.recipe.knobs("refinement")["fit_tokens"])
        )

    def fitting(self, size: Size, layers_at_once: int, tokens: int = FIT_TOKENS) -> int:
        """Return the bytes of the local fits of `layers_at_once` layers."""
        # What enters the layer and what left the last attention, for all of them; of each layer
        # what enters and leaves it, for the newest twice, and what enters it before the norm.
        states = (
            (2 + 2 * layers_at_once + 3) * min(self.used_tokens, tokens) * self.geometry.hidden_size
        )
        attention = size.attention + self.added
        return FLOAT * (layers_at_once * ADAM_COPIES * attention + states)

    @property
    def polish_tokens(self) -> int:
        """Tokens of a step of the polish."""
        length = self.sequence_length
        return length * polish_rows(length, self.calibration_tokens // length)

    def polishing(self, size: Size, gpu_memory: int = 0) -> int:
        """Return the bytes of the polish in addition to the two models; 0 without one.

        The trained weights are no longer those of the original; gradients, the optimizer's float32
        copy where the weights are none, two moments and a spare one; what enters each layer, and
        the inner values of one; logits; what the original model has said.
        """
        if not self.polish_steps:
            return 0
        g, width = self.geometry, self.working.itemsize
        trained, other_parameters = key_value_parameters(g), 0
        if self.polish_weights == "all":
            trained = size.total
            other_parameters = size.total - size.attention * g.num_layers
        copies = width + 3 * FLOAT + (FLOAT if width < FLOAT else 0)
        tokens = self.polish_tokens
        inner = g.num_layers * g.hidden_size + layer_values(self.config)
        states = min(TEACHER_BYTES, width * self.calibration_tokens * g.hidden_size)
        logits = most_logit_bytes(g.vocab_size, tokens, gpu_memory)
        return (
            width * other_parameters + copies * trained + width * tokens * inner + logits + states
        )


def lifted_weights(geometry: HeadGeometry) -> int:
    """Return the weights that a layer has in addition where each query head has its own KV head."""
    g = geometry
    return 2 * (g.num_heads - g.num_kv_heads) * g.head_dim * g.hidden_size


def layer_values(config: PretrainedConfig) -> int:
    """Return the numbers per token that a layer stores for the backward pass.

    Norms, projections, attention's output, the MLP's inner values.
    """
    g = geometry_of(config)
    return 6 * g.hidden_size + 4 * g.num_heads * g.head_dim + 4 * inner_size(config)


def inner_size(config: PretrainedConfig) -> int:
    """Return the width of the MLP; of a mixture that of the experts of a token together."""
    inner = (
        getattr(config, "intermediate_size", None)
        or getattr(config, "ffn_dim", 0)
        or 4 * geometry_of(config).hidden_size
    )
    if not (experts := getattr(config, "num_experts_per_tok", None)):
        return int(inner)
    if (of_one := getattr(config, "moe_intermediate_size", None)) is None:
        return int(inner * experts)
    experts += getattr(config, "n_shared_experts", None) or 0
    return max(int(of_one * experts), int(inner))  # some layers may have an MLP


def trained_parameters(config: PretrainedConfig, size: Size, train: TrainSettings) -> int:
    """Return how many numbers of a model are trained."""
    if train.tuning == "full":
        return size.total
    if train.tuning == "kv":
        return key_value_parameters(geometry_of(config))
    with torch.device("meta"):
        layer = empty(window_config(config, 0, 2), torch.float32, torch.device("meta"))
    prefix = layer_prefix(layer)
    adapted: list[Any] = [m for name, m in adaptable(layer).items() if name.startswith(prefix)]
    sides = sum(sum(module.weight.shape) for module in adapted)
    return train.lora_rank * int(sides) * geometry_of(config).num_layers


class PlannedConversion(NamedTuple):
    """A named candidate of a search, as far as its size depends on it.

    Attributes:
        kv_ratio: The requested share of the checkpoint's KV cache.
        used_ratio: The share that its plan uses.
    """

    recipe: Recipe
    kv_ratio: float
    used_ratio: float


@dataclass(frozen=True)
class SearchInputs:
    """The inputs of the estimates of a search.

    Attributes:
        config: Its configuration.
        model: The checkpoint's config.
        written: The dtype that models are written in.
        candidates: Its named candidates.
    """

    config: SearchConfig
    model: PretrainedConfig
    written: torch.dtype
    candidates: tuple[PlannedConversion, ...]

    @cached_property
    def size(self) -> Size:
        return Size.of(self.model)

    @cached_property
    def geometry(self) -> HeadGeometry:
        return geometry_of(self.model)

    def trainings(self, train: TrainSettings) -> list[TrainSettings]:
        """Return `train` with what each candidate's recovery changes of it."""
        return [
            TrainSettings.model_validate(train.model_dump() | c.recipe.apply("recovery"))
            for c in self.candidates
        ]


def _numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
