"""Settings of a training.

One set of settings for brief fine-tuning and for full continued pre-training.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)
from pydantic_core.core_schema import ValidationInfo

from attention.io.dtype_names import full_name
from trainers.deepspeed_keys import check_keys

_LONGEST = 4096
"""Characters of a text in a configuration: that of the longest path."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # what every generator below takes


Strategy = Literal["auto", "PACK", "STRICT_PACK", "SPREAD"]
"""Placement of workers on nodes, in Ray's words; AUTO: decided at the start by the available
nodes."""
AUTO_STRATEGY: Strategy = "auto"


COLLECTIVE_SECONDS = 1800
"""torch.distributed's own limit, by which a worker that waits for others fails."""


class Shape(NamedTuple):
    """Workers of a training.

    How many, CPUs and GPUs of each, which accelerators (Ray's name; None: any), their placement on
    nodes, their device ("cuda" or "cpu"), how few of them are enough (None: no fewer), and how long
    they wait for each other in a collective operation.
    """

    workers: int
    cpus: float
    gpus: float
    accelerator_type: str | None = None
    strategy: Strategy = AUTO_STRATEGY
    device: str = "cpu"
    fewest: int | None = None
    collective_seconds: int = COLLECTIVE_SECONDS

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change while they train."""
        return self.fewest is not None


class StrictModel(BaseModel):
    """A section of a configuration.

    Unknown keys are refused, and so is what no field can be meant to hold. The docstring below a
    field is its description.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plausible(cls, value: Any, info: ValidationInfo) -> Any:
        """No true or false where a number belongs, no bytes, no text that is no line of text."""
        field = cls.model_fields[str(info.field_name)]
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, bool) and bool not in (
                field.annotation,
                *get_args(field.annotation),
            ):
                raise ValueError("expected no true or false here")
            if isinstance(one, bytes):
                raise ValueError("expected text or a number, not bytes")
            if isinstance(one, str) and not _is_line(one):
                raise ValueError(
                    f"expected one line of text, at most {_LONGEST} characters, none for control"
                )
        return value


def threads_of(cpus: float) -> int:
    """Return the threads of a process with so many CPUs: rounded, so that 1.9 of two are both."""
    return max(1, round(cpus))


def _is_line(text: str) -> bool:
    return len(text) <= _LONGEST and not any(c < " " or "\ud800" <= c <= "\udfff" for c in text)


def _checked_keys(values: dict[str, Any]) -> dict[str, Any]:
    check_keys(values)
    return values


class TrainSettings(StrictModel):
    """The optimiser, its schedule, the batch, and the machinery.

    An impossible combination cannot be constructed.
    """

    learning_rate: Annotated[float, Field(gt=0)] = 3e-4
    """Peak of the schedule: a linear warm-up, then a cosine."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW's, of matrices: norms, biases and embeddings have none."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's; Xiao 2024 (App. C) trains from scratch with 0.9."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's; Xiao 2024 (App. C) trains from scratch with 0.95, and so do most trainings with
    batches of half a million tokens or more, where the default averages over too many steps."""
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the steps in which the learning rate rises."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Final share of the learning rate."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Sequences per step over all workers; a multiple of num_workers x micro_batch_size."""
    micro_batch_size: Annotated[int | None, Field(ge=1)] = None
    """Sequences per forward pass of one worker; none: all of its share."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Norm that gradients are clipped to."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What DeepSpeed splits over workers: 0 nothing, 1 optimiser state, 2 and gradients, 3 and
    weights."""
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        BeforeValidator(
            full_name, json_schema_input_type=Literal["float32", "bfloat16", "fp32", "bf16"]
        ),
    ] = "float32"
    """What training computes in; what a promotion ships has the checkpoint's own. bfloat16 needs
    zero_stage 1 to 3."""
    distillation: Literal["none", "kl", "kl_bild"] = "none"
    """kl mixes KL(original model ‖ model) into the loss, kl_bild KL + BiLD (Jin 2024)."""
    distillation_weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the distillation in the loss; the language-modelling loss keeps the rest."""
    teacher_logits: Literal["live", "cached"] = "live"
    """Source of the original model's predictions for distillation kl. live: it runs during the
    training. cached: the `teacher_logits_k` likeliest tokens of each position are kept on disk,
    once for a text and an original, and no training loads it; the others count together, so that
    the divergence is a lower bound of the whole one, and reports have no KL. A relaxation always
    runs it."""
    teacher_logits_k: Annotated[int, Field(ge=1)] = 64
    """Tokens of each position that are kept with `teacher_logits: cached`."""
    tuning: Literal["full", "lora", "kv"] = "full"
    """full trains all weights; lora adapters with frozen weights, merged in the trained checkpoint;
    kv the projections of keys and values alone. A relaxation always trains all weights."""
    lora_rank: Annotated[int, Field(ge=1)] = 8
    """Rank of the adapters."""
    lora_alpha: Annotated[float, Field(gt=0)] = 16.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    activation_checkpointing: bool | Literal["selective", "auto"] = "auto"
    """Activations inside a decoder layer that are recomputed in the backward pass instead of
    stored: none (false), all of them (true), which takes a third more time and far less memory, or
    all but the results of matrix products and attention (selective). auto: as few as the memory of
    a search's GPUs allows by the estimate, and none elsewhere."""
    compile: bool = False
    """Compiles the decoder layers (torch.compile): fewer and larger kernels on a GPU, for some
    minutes at the first step. Not with zero_stage 3, whose hooks would break them up."""
    document_mask: bool = False
    """The documents of a sequence do not attend to each other, and their positions start again.
    Evaluation reads sequences as they are."""
    assistant_only_loss: bool = False
    """Only the tokens of answers count in the loss, each end of a turn included: for conversations
    (`messages`), by the tokenizer's chat template. The mean is over the answers of the sequences
    of a step. Evaluation counts all tokens."""
    deepspeed: Annotated[dict[str, JsonValue], AfterValidator(_checked_keys)] = {}
    """Keys of DeepSpeed's own configuration that are merged into Headfold's last, e.g.
    `{zero_optimization: {overlap_comm: false}}`; keys that a setting here determines are refused.
    """
    num_workers: Annotated[
        int,
        Field(
            ge=1,
            json_schema_extra={
                "type": ["integer", "array"],
                "items": {"type": "integer", "minimum": 1},
            },
        ),
    ] = 1
    """Workers of one training. `[2, 8]`: as many as there is room for, 2 at least; for a promotion
    alone."""
    min_workers: Annotated[int | None, Field(ge=1)] = None
    """The fewest workers: how a range in `num_workers` is kept (`[2, 8]`: min_workers 2,
    num_workers 8)."""
    cpus_per_worker: Annotated[float, Field(gt=0)] = 1.0
    """CPUs of each worker."""
    gpus_per_worker: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of each worker: 1, or a part of one for a single worker."""
    collective_seconds: Annotated[int, Field(ge=1)] = COLLECTIVE_SECONDS
    """How long workers wait for each other in a collective operation before they fail: more than
    the first one takes to write the weights of a large model to a slow folder."""
    device: Literal["auto", "cpu"] = "auto"
    """The device to compute on. auto: the GPUs that a process requested, if any. cpu: never a GPU,
    even if GPUs are requested, so that a search of a GPU cluster can be rehearsed where Ray only
    counts them."""
    seed: Seed = 0
    """Random seed of adapters and of dropout; those of plans and texts are in `search`."""

    @model_validator(mode="before")
    @classmethod
    def _range(cls, value: Any) -> Any:
        """`num_workers: [fewest, most]` as two numbers."""
        counts = value.get("num_workers") if isinstance(value, Mapping) else None
        if not isinstance(counts, list | tuple):
            return value
        if len(counts) != 2:
            raise ValueError(
                f"num_workers must be a number, or the fewest and the most of them, got "
                f"{list(counts)}"
            )
        return {**value, "min_workers": counts[0], "num_workers": counts[1]}

    @model_validator(mode="after")
    def _possible(self) -> TrainSettings:
        if self.dtype == "bfloat16" and self.zero_stage == 0:
            raise ValueError(
                "dtype bfloat16 needs zero_stage 1, 2 or 3, got 0: DeepSpeed's plain bfloat16 "
                "optimiser takes wrong "
                "first steps; set zero_stage=1 or dtype=float32"
            )
        if self.keeps_teacher_logits and self.document_mask:
            raise ValueError(
                "teacher_logits cached keeps predictions across documents, document_mask has none; "
                "set teacher_logits=live or document_mask=false"
            )
        if self.teacher_logits == "cached" and self.distillation == "kl_bild":
            raise ValueError(
                "teacher_logits cached has no logits for kl_bild; set distillation=kl or "
                "teacher_logits=live"
            )
        if self.gpus_per_worker % 1 and (self.num_workers > 1 or self.gpus_per_worker > 1):
            raise ValueError(
                "gpus_per_worker must be a whole number, or a part of a GPU for one worker alone, "
                "got "
                f"{self.gpus_per_worker:g} for each of {self.num_workers}: NCCL takes no two "
                f"workers on one GPU; set "
                "gpus_per_worker=1 or num_workers=1"
            )
        if self.compile and self.zero_stage == 3:
            raise ValueError(
                "compile needs zero_stage 0, 1 or 2, got 3: the weights of a layer come and go "
                "within it; set compile=false or a lower zero_stage"
            )
        if self.compile and self.activation_checkpointing == "selective":
            raise ValueError(
                "activation_checkpointing selective: a compiled layer chooses by itself what it "
                "computes anew; set it to false or true, or compile=false"
            )
        size = self.device_batch_size
        if self.min_workers is not None:
            if not self.min_workers <= self.num_workers <= self.batch_size:
                raise ValueError(
                    "num_workers: the fewest must not be more than the most, nor the most more "
                    "than batch_size "
                    f"{self.batch_size}, got [{self.min_workers}, {self.num_workers}]"
                )
        elif self.batch_size % (self.num_workers * size):
            raise ValueError(
                f"batch_size must be a multiple of num_workers x micro_batch_size = "
                f"{self.num_workers} x {size} = "
                f"{self.num_workers * size}, got {self.batch_size}"
            )
        return self

    def __hash__(self) -> int:
        # A mapping in it is not hashable
        return hash(json.dumps(self.model_dump(), sort_keys=True))

    def identity(self) -> dict[str, Any]:
        """Return the settings in the form in which records of trainings compare them.

        Keys that were added later are left out where they change nothing, so that a training that
        was started without them can be resumed.
        """
        record = self.model_dump(mode="json")
        record["activation_checkpointing"] = self.activation_checkpointing is True
        del record["collective_seconds"]  # how long it may take, and not what comes of it
        for name in ("document_mask", "compile", "assistant_only_loss"):
            if not record[name]:
                del record[name]
        if not self.keeps_teacher_logits:
            del record["teacher_logits"], record["teacher_logits_k"]
        return record

    @property
    def device_batch_size(self) -> int:
        """Sequences that one worker holds in memory at once."""
        return self.micro_batch_size or self.worker_batch_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """Forward and backward passes of one worker in a step."""
        return math.ceil(self.worker_batch_size / self.device_batch_size)

    @property
    def worker_batch_size(self) -> int:
        """Sequences of a step that one worker has at most."""
        return math.ceil(self.batch_size / self.num_workers)

    @property
    def keeps_teacher_logits(self) -> bool:
        """Whether the teacher's predictions come from disk."""
        return self.distillation != "none" and self.teacher_logits == "cached"

    def on(self, workers: int) -> TrainSettings:
        """Return the same training on so many workers."""
        return self.model_copy(update={"num_workers": workers, "min_workers": None})

    @property
    def threads(self) -> int:
        """Threads of a worker on the CPU."""
        return threads_of(self.cpus_per_worker)

    @property
    def shape(self) -> Shape:
        device = self.device_with(self.gpus_per_worker)
        fewest = self.min_workers
        return Shape(
            self.num_workers,
            self.cpus_per_worker,
            self.gpus_per_worker,
            device=device,
            fewest=fewest,
            collective_seconds=self.collective_seconds,
        )

    def device_with(self, gpus: float) -> str:
        """Return the device of a process that requested so many GPUs."""
        return "cuda" if gpus and self.device == "auto" else "cpu"

    def rate(self, step: int, total_steps: int) -> float:
        """Learning rate of the step after `step` finished ones.

        Linear warm-up, then a cosine to the final fraction.

        A pure function of the position, so that resuming needs no scheduler state and a longer run
        is the same schedule over more steps.
        """
        warmup = math.ceil(self.warmup_fraction * total_steps)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        factor = (
            self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
        )
        return self.learning_rate * factor
