"""Peak memory of each process of a search that loads a model, by parts, from configs alone.

Legend: P parameters, W workers, D model dim, V vocabulary, B sequences at once of T tokens, b bytes
of a number.

Each process has tensors that are always in memory, and phases that do not overlap; the largest of
these counts. The additional memory of a relaxation, compared with a training, and the values of a
message that NCCL has in flight, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import torch
from transformers import PretrainedConfig

from attention.base.text import gib
from attention.calibration.sizes import Mixed
from attention.families import geometry_of
from attention.geometry import HeadGeometry
from attention.io.piecewise import SHARD
from attention.io.precision import DTYPES
from attention.modeling.predictions import most_logit_bytes, positions_at_once
from orchestrator.cluster.placement import Demand
from orchestrator.config.schema import SearchConfig
from orchestrator.resources.accelerators import (
    GIGABYTES,
    memory_in_words,
    memory_of,
    most_memory_of,
)
from orchestrator.resources.memory import converted_attention, in_memory_stages
from orchestrator.resources.size import (
    READING,
    SPARE,
    Conversion,
    SearchInputs,
    Size,
    inner_size,
    layer_values,
    lifted_weights,
    trained_parameters,
)
from trainers.deepspeed_config import config_of, sums_in_float32
from trainers.evaluation import TEACHER_BYTES
from trainers.settings import TrainSettings

# Resident memory of a worker's libraries: torch, transformers, DeepSpeed, Ray
PROCESS = 650 * 2**20
FLOAT = 4
OF_ZERO = {
    "reduce_bucket_size": 500_000_000, "sub_group_size": 1_000_000_000,
    "stage3_max_live_parameters": 1_000_000_000, "stage3_prefetch_bucket_size": 50_000_000,
}  # fmt: skip
"""DeepSpeed's defaults, in numbers, of what it gathers, sends and steps at once."""
TRAINING_WORKER, PROMOTION_WORKER = "training worker", "promotion worker"
TRAININGS = {
    TRAINING_WORKER: "train",
    "search phase of DHA": "train",
    PROMOTION_WORKER: "promotion.train",
}
"""The processes that train, and the section of the configuration that each is configured in."""
Parts = dict[str, int]


class NeedRecord(TypedDict):
    """A `Need` in the JSON of an estimate, bytes by part."""

    process: str
    total: int
    parts: Parts
    share: float
    accelerator_type: str | None
    limit: int | None
    fits: bool


@dataclass(frozen=True)
class Need:
    """Peak memory of one process.

    Attributes:
        process: Its name.
        parts: Bytes by what they are for, on the GPU if it has one, else in the host's memory.
        share: Of a GPU.
        accelerator_type: Ray's name of the GPU's type, if the process requires one.
    """

    process: str
    parts: Parts
    share: float = 0.0
    accelerator_type: str | None = None

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    @property
    def limit(self) -> int | None:
        """Bytes that it may take on its GPU; None without a GPU or for an unknown type."""
        memory = memory_of(self.accelerator_type) if self.share and self.accelerator_type else None
        return None if memory is None else round(memory * min(1.0, self.share))

    @property
    def fits(self) -> bool:
        return self.limit is None or self.total <= self.limit

    @property
    def remedy(self) -> str:
        """The setting that reduces its largest part."""
        if (train := TRAININGS.get(self.process)) is None:
            return "resources.trial_gpus=0, which plans on CPUs"
        if self.largest in ("activations", "logits"):
            return f"a smaller {train}.micro_batch_size or {train}.activation_checkpointing=true"
        no_teacher = f"{train}.distillation=none, " if "teacher" in self.parts else ""
        return (
            f"{train}.zero_stage=3 with more {train}.num_workers, {train}.tuning=lora, "
            f"{no_teacher}or DeepSpeed's offloading"
        )

    @property
    def summary(self) -> str:
        """Its bytes in words, of its GPU's memory if that is known."""
        where = " of a GPU" if self.share else " of the machine"
        if self.limit:
            where = f" of the {gib(self.limit)} that it may take of a GPU ({self.accelerator_type})"
        return f"{gib(self.total)}{where}"

    def describe(self) -> str:
        """Return its bytes in words, and its parts by falling size."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return f"{self.summary}: {', '.join(f'{name} {gib(count)}' for name, count in parts)}"

    def record(self) -> NeedRecord:
        """Return it as JSON has it."""
        return {
            "process": self.process,
            "total": self.total,
            "parts": self.parts,
            "share": self.share,
            "accelerator_type": self.accelerator_type,
            "limit": self.limit,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class TrainingMemory:
    """Peak memory of a training worker.

    Attributes:
        model: The checkpoint's config.
        sequence_length: Tokens per sequence.
        accelerator_type: Ray's name of the type of its GPU, if it requires one.
    """

    model: PretrainedConfig
    sequence_length: int
    accelerator_type: str | None = None

    @cached_property
    def size(self) -> Size:
        return Size.of(self.model)

    @cached_property
    def geometry(self) -> HeadGeometry:
        return geometry_of(self.model)

    def need(self, process: str, train: TrainSettings) -> Need:
        """Return the need of a worker; where their number may change, with the largest share."""
        return self._need(
            process, train, self.parts(train.on(train.min_workers or train.num_workers))
        )

    def search_phase(self, train: TrainSettings) -> Need:
        """Return the need of DHA's search phase with the settings of a training.

        One worker trains all weights, of a copy with a KV head per query head.
        """
        alone = train.on(1).model_copy(update={"tuning": "full", "distillation": "none"})
        g = self.geometry
        tokens = alone.device_batch_size * self.sequence_length
        copies = 4 * lifted_weights(g)  # weights, gradients, two moments
        # Keys of each query head before and after their rotation, and parts of it
        keys = 4 * g.num_heads * g.head_dim * tokens
        lifted = {"lifted heads": FLOAT * g.num_layers * (copies + keys)}
        return self._need("search phase of DHA", train, self.parts(alone) | lifted)

    def _need(self, process: str, train: TrainSettings, parts: Parts) -> Need:
        gpus = train.gpus_per_worker
        return Need(process, parts, gpus, self.accelerator_type if gpus else None)

    def parts(self, train: TrainSettings) -> Parts:
        """Return the parts of a training worker.

        Weights, gradients and optimiser state as far as the ZeRO stage leaves them whole, the
        teacher where something is distilled, and the larger of two moments: the end of a forward
        pass, with the activations of the backward pass, or the optimiser's step, with gradients in
        its own dtype and Adam's temporaries.
        """
        width = DTYPES[train.dtype].itemsize
        on_gpu = train.gpus_per_worker > 0
        zero = _zero(train)
        trained = trained_parameters(self.model, self.size, train)
        share = {
            name: train.num_workers if train.zero_stage >= stage else 1
            for name, stage in _ZERO_STAGES.items()
        }
        master, state = _optimiser_bytes(train)
        summed = FLOAT if sums_in_float32(train) else width
        if summed != width and train.zero_stage == 1:
            summed += width  # gradients of one pass in addition to their sum
        permanent = {
            "libraries": 0 if on_gpu else PROCESS,
            "weights": self.size.total * width / share["weights"],
            "gradients": trained * summed / share["gradients"],
            "optimiser": trained * (master + 2 * state) / share["optimiser"],
        }
        if train.distillation != "none":
            permanent["teacher"] = self.size.total * width / share["weights"]
        bucket = zero["reduce_bucket_size"] if on_gpu else min(zero["reduce_bucket_size"], trained)
        if train.zero_stage:
            permanent["buckets"] = (
                width * bucket * (2 if train.zero_stage < 3 and zero.get("overlap_comm") else 1)
            )
        if train.zero_stage == 3:
            live = max(
                zero["stage3_max_live_parameters"],
                self.size.embedding + zero["stage3_prefetch_bucket_size"],
            )
            # Of each model what is whole at once; of the largest gradient itself, what is sent and
            # what is received
            whole = (
                min(self.size.total, live) * (1 + ("teacher" in permanent))
                + 3 * self.size.embedding
            )
            # gloo copies what it gathers, and what it scatters
            if not on_gpu and train.num_workers > 1:
                whole += 2 * self.size.embedding
            permanent["gathered"] = width * whole
        part = trained / share["optimiser"]
        at_once = min(part, zero["sub_group_size"]) if train.zero_stage == 3 else part
        # torch's Adam: a root and a quotient, on GPUs in place
        temporary = state * (1 if on_gpu else 2)
        step = at_once * (temporary + (max(master, width) if train.zero_stage else 0))
        # Gradients, flat, and in the optimiser's dtype where that is another one
        step += part * width if train.zero_stage in (1, 2) and summed == width else 0
        if on_gpu and _device(zero, "offload_optimizer") != "none":
            permanent["optimiser"] = step = 0
        if on_gpu and _device(zero, "offload_param") != "none":
            permanent["weights"] = 0
        # rank 0 collects a file in the host's memory
        written = 0 if on_gpu else min(SHARD, self.size.total * width)
        return _peak(
            permanent,
            self._way_back(train, width),
            {"optimiser's step": step},
            {"written file": written},
        )

    def _way_back(self, train: TrainSettings, width: int) -> dict[str, float]:
        """Return the parts that a forward pass leaves for the backward pass.

        The logits are those of a part of the micro-batch, whose gradient of the head's weights is
        in memory in addition to their sum over the parts.
        """
        g, tokens = self.geometry, train.device_batch_size * self.sequence_length
        values = layer_values(self.model)
        layers = g.num_layers * values
        # What enters each layer, results of products, and the inner values of the one made again
        if train.activation_checkpointing is True:
            layers = g.num_layers * g.hidden_size + values
        elif train.activation_checkpointing == "selective":
            layers = g.num_layers * (g.hidden_size + self._layer_products) + values
        kind = self.accelerator_type
        memory = most_memory_of(kind) if train.gpus_per_worker > 0 else 0
        several = tokens > positions_at_once(g.vocab_size, memory)
        slope = self.size.embedding * width if several else 0
        masks = tokens * self.sequence_length if train.document_mask else 0
        return {
            "activations": width * tokens * layers + masks,
            "logits": most_logit_bytes(g.vocab_size, tokens, memory) + slope,
        }

    @property
    def _layer_products(self) -> int:
        """Numbers per token that the matrix products and the attention of a layer result in."""
        g = self.geometry
        inner = inner_size(self.model)
        return 2 * g.hidden_size + 4 * g.num_heads * g.head_dim + 2 * inner


def search_phase_bytes(conversion: Conversion) -> int:
    """Return the bytes that DHA's search phase adds to a conversion's process; 0 without one."""
    if conversion.search_phase is None:
        return 0
    memory = TrainingMemory(conversion.config, conversion.sequence_length)
    need = memory.search_phase(conversion.search_phase)
    return need.total - need.parts["libraries"]


@dataclass(frozen=True)
class Needs:
    """The processes of one search. `mixed`: how the mixed moments of the statistics are stored."""

    inputs: SearchInputs
    mixed: Mixed

    def all(self) -> list[Need]:
        """Return the needs of the processes that load a model, and of the driver."""
        needs = [self.driver(), self.original(), self.planning(), *self.trainings()]
        if any(conversion.search_phase for conversion in self.conversions):
            settings = self.resolved(TRAINING_WORKER, self.config.train)
            needs.append(self.memory_of_workers(TRAINING_WORKER).search_phase(settings))
        return [*needs, self.gate()] if self.config.promotion.enabled else needs

    def refusals(self) -> list[str]:
        """Return a line for each process that does not fit its GPU: bytes, largest part, remedy."""
        return [self._refusal(need) for need in self.all() if not need.fits]

    def _refusal(self, need: Need) -> str:
        assert need.accelerator_type is not None
        of_trials = need.process not in TRAININGS and self.config.resources.trial_accelerator_type
        key = f"resources.{'trial_accelerator_type' if of_trials else 'accelerator_type'}"
        if need.process == PROMOTION_WORKER and self.config.promotion.resources.accelerator_type:
            key = "promotion.resources.accelerator_type"
        share = f" and {need.share:g} of it is requested" if need.share < 1 else ""
        larger = [kind for kind in GIGABYTES if (memory_of(kind) or 0) >= need.total]
        larger_type = (
            f"; or {key}={min(larger, key=lambda kind: GIGABYTES[kind])}" if larger else ""
        )
        return (
            f"{key}: {memory_in_words(need.accelerator_type)}{share}, but the {need.process} takes "
            f"{gib(need.total)}, {gib(need.parts[need.largest])} of it {need.largest}; what "
            f"helps: {need.remedy}{larger_type}"
        )

    def driver(self) -> Need:
        return Need("driver", {"libraries": PROCESS, "texts": READING})

    def original(self) -> Need:
        """Return the need of measuring the original model, and of calibrating it layer by layer."""
        first, width = self.conversions[0], self.working.itemsize
        measured = {"weights": width * self.size.total} | self.evaluating()
        calibration = {
            "layer": width * self.size.layer,
            "statistics": first.statistics() + first.sums() + first.calibrating(),
        }
        return self._task("original model", {"libraries": self._libraries}, measured, calibration)

    def planning(self) -> Need:
        """Return the need of planning, converting and measuring a candidate: the largest of all.

        In addition to the model only the attention of the converted one is in memory: the rest is
        shared.
        """
        return max(
            (self._planning(conversion) for conversion in self.conversions),
            key=lambda need: need.total,
        )

    def _planning(self, conversion: Conversion) -> Need:
        width = self.working.itemsize
        states = self.config.data.eval.tokens * self.geometry.hidden_size
        permanent = {"libraries": self._libraries, "weights": width * self.size.total}
        permanent["converted attention"] = converted_attention(conversion, self.size)
        permanent["records of layers"] = conversion.recorded()
        moments = [
            {name: number}
            for name, number in in_memory_stages(
                conversion, self.size, self._trial_gpu_memory
            ).items()
        ]
        measured = self.evaluating() | {"teacher's states": min(TEACHER_BYTES, width * states)}
        return self._task("planning", permanent, *moments, measured)

    def trainings(self) -> list[Need]:
        """Return the needs of the workers of trials and promotion, with the most costly recipe."""
        needs: list[Need] = []
        for process, train in self._trained_by():
            settings = self.inputs.trainings(self.resolved(process, train))
            each = (self.memory_of_workers(process).need(process, one) for one in settings)
            needs.append(max(each, key=lambda need: need.total))
        return needs

    def resolved(self, process: str, train: TrainSettings) -> TrainSettings:
        """Return settings with what `activation_checkpointing` comes to."""
        return train.model_copy(update={"activation_checkpointing": self.recomputations[process]})

    def _trained_by(self) -> list[tuple[str, TrainSettings]]:
        """Return the processes that train, with their settings."""
        named: list[tuple[str, TrainSettings]] = [(TRAINING_WORKER, self.config.train)]
        if self.config.promotion.enabled and self.config.promotion.steps:
            named.append((PROMOTION_WORKER, self.config.promotion_train))
        return named

    @cached_property
    def recomputations(self) -> dict[str, bool | str]:
        """Return what `activation_checkpointing` comes to, by process.

        For auto the first that leaves room: nothing, all but matrix products, all is computed anew.
        """
        return {process: self._recomputation(process, t) for process, t in self._trained_by()}

    def _recomputation(self, process: str, train: TrainSettings) -> bool | str:
        if train.activation_checkpointing != "auto":
            return train.activation_checkpointing
        for choice in (False,) if train.compile else (False, "selective"):
            changed = train.model_copy(update={"activation_checkpointing": choice})
            trainings = self.inputs.trainings(changed)
            needs = [self.memory_of_workers(process).need(process, each) for each in trainings]
            if all(need.limit is None or need.total <= SPARE * need.limit for need in needs):
                return choice
        return True

    def memory_of_workers(self, process: str) -> TrainingMemory:
        """Return the memory of the workers of trials, or of the promotion."""
        return self._memory_of_workers[process == PROMOTION_WORKER]

    @cached_property
    def _memory_of_workers(self) -> tuple[TrainingMemory, TrainingMemory]:
        config = self.config
        kinds = config.resources.accelerator_type, config.promotion_shape.accelerator_type
        of_trials, of_promotion = (
            TrainingMemory(self.inputs.model, config.data.sequence_length, kind) for kind in kinds
        )
        return of_trials, of_promotion

    def gate(self) -> Need:
        """Return the need of the gate: the trained model in float32 on the CPU, then its export.

        The logits by which two models are compared exist three times: before, after, and their
        difference.
        """
        width, tokens = FLOAT, 2 * self.config.data.sequence_length
        parts = {"libraries": PROCESS, "weights": width * self.size.total}
        parts["exported attention"] = width * self.geometry.num_layers * self.size.attention
        parts |= {"logits": 3 * width * tokens * self.geometry.vocab_size}
        return Need("gate", parts | {"activations": self._inner(tokens, width)})

    # ---- what they have in common ----------------------------------------------------------------

    @property
    def config(self) -> SearchConfig:
        return self.inputs.config

    @property
    def size(self) -> Size:
        return self.inputs.size

    @property
    def geometry(self) -> HeadGeometry:
        return self.inputs.geometry

    @property
    def working(self) -> torch.dtype:
        """The dtype of a trial before it trains."""
        return self.inputs.written if self.config.resources.trial_gpus else torch.float32

    @cached_property
    def conversions(self) -> list[Conversion]:
        """The conversions of the named candidates."""
        data = self.config.data
        return [
            Conversion(
                config=self.inputs.model,
                recipe=candidate.recipe,
                kv_ratio=candidate.used_ratio,
                calibration_tokens=data.calibration.tokens,
                eval_tokens=data.eval.tokens,
                sequence_length=data.sequence_length,
                dtype=self.inputs.written,
                working=self.working,
                mixed=self.mixed,
                in_files=True,
            )
            for candidate in self.inputs.candidates
        ]

    @property
    def _libraries(self) -> int:
        """Return the bytes of libraries in the host's memory.

        `memory_of` leaves out what CUDA takes of a GPU.
        """
        return 0 if self.config.resources.trial_gpus else PROCESS

    @property
    def _trial_gpu_memory(self) -> int:
        """Return the bytes of the GPU that plans and measures; 0 for CPUs."""
        demand = Demand.of(self.config)
        return most_memory_of(demand.task_type) if demand.trial_gpus else 0

    def _task(
        self, process: str, permanent: Mapping[str, int], *moments: Mapping[str, int]
    ) -> Need:
        demand = Demand.of(self.config)
        return Need(process, _peak(permanent, *moments), demand.trial_gpus, demand.task_type)

    def _inner(self, tokens: int, width: int) -> int:
        """Return the memory of a pass without gradients: the stream and a layer's output."""
        values = 2 * self.geometry.hidden_size + layer_values(self.inputs.model)
        return tokens * width * values

    def evaluating(self) -> Parts:
        """Return the parts of an evaluation before any training, of the trials' micro-batch."""
        tokens = self.config.train.device_batch_size * self.config.data.sequence_length
        logits = most_logit_bytes(self.geometry.vocab_size, tokens, self._trial_gpu_memory)
        return {"activations": self._inner(tokens, self.working.itemsize), "logits": logits}


_ZERO_STAGES = {"optimiser": 1, "gradients": 2, "weights": 3}
"""The ZeRO stage from which on each is split over the workers."""


def _zero(train: TrainSettings) -> dict[str, Any]:
    return OF_ZERO | config_of(train)["zero_optimization"]


def _device(zero: Mapping[str, Any], what: str) -> str:
    section: Mapping[str, str] = zero.get(what) or {}
    return section.get("device", "none")


def _optimiser_bytes(train: TrainSettings) -> tuple[int, int]:
    """Return the bytes per number of the optimiser's copy of the weights, and of each moment."""
    bf16, width = config_of(train).get("bf16", {}), DTYPES[train.dtype].itemsize
    master = width if bf16.get("bf16_master_weights_and_grads") else FLOAT
    state = width if bf16.get("bf16_optimizer_states") else FLOAT
    return master if train.zero_stage else 0, state


def _peak(permanent: Mapping[str, float], *moments: Mapping[str, float]) -> Parts:
    """Return the permanent parts with those of the largest moment."""
    largest = max(moments, key=lambda moment: sum(moment.values()))
    return {
        name: round(number) for name, number in (dict(permanent) | dict(largest)).items() if number
    }
