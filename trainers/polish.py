"""The polish of a conversion: a few tens of steps towards the original model's predictions.

The loss is KL(original ‖ converted) on calibration text, in this process, on the device of the two
models.

Legend: B sequences per step, T tokens per sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attention.base.progress import stage
from attention.modeling.predictions import Final, mean_cost
from trainers.evaluation import CachedTeacher
from trainers.freezing import freeze_all_but_keys_and_values
from trainers.jobs.utilization import TokenWork
from trainers.loop import LossFunction, train_model
from trainers.losses import kl
from trainers.recomputation import recompute
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream

PolishWeights = Literal["all", "kv"]
"""The weights that a polish trains: all, or the projections of keys and values alone."""
POLISH_TOKENS = 2048
"""Tokens of a step, about: whole sequences, one at least."""
RATES: dict[str, float] = {"all": 1e-4, "kv": 3e-4}
"""Peak learning rates, by what is trained."""
_MOST_SCALE = 2.0**16
"""Of the loss of a float16 model."""


@dataclass(frozen=True)
class PolishWork:
    """The result of a polish.

    Attributes:
        steps: Optimizer steps.
        tokens: Tokens trained on, each time that one is.
        flops: Floating-point operations: forward twice (activations are computed again) and back,
            and forward through the original model, once for each sequence.
        weights: What was trained.
        learning_rate: Peak of the schedule.
        first_loss: KL before the first step, on its sequences, in nats per token.
        last_loss: KL before the last step, on its sequences.
    """

    steps: int
    tokens: int
    flops: float
    weights: str
    learning_rate: float
    first_loss: float
    last_loss: float


def polish_rows(length: int, sequences: int) -> int:
    """Return how many of `sequences` of `length` tokens each step uses."""
    return min(sequences, max(1, POLISH_TOKENS // length))


def polish(
    original: CachedTeacher,
    converted: Any,
    sequences: Tensor,
    *,
    steps: int,
    weights: PolishWeights,
    seed: int = 0,
) -> PolishWork:
    """Train a converted model in place towards the original's predictions.

    Weights that are trained get new memory, so that the original is not changed.

    Args:
        original: The model to come close to.
        converted: What is trained, in any dtype; the optimizer's copy is float32.
        sequences: Calibration tokens, `[N, T]`.
        steps: Optimizer steps.
        weights: What is trained.
        seed: Of the order of the sequences.

    Raises:
        ValueError: For `kv` of a model whose layers share heads.
        TrainingDiverged: When the loss is no longer finite.
    """
    rows = polish_rows(sequences.shape[1], len(sequences))
    settings = TrainSettings(
        learning_rate=RATES[weights], batch_size=rows, activation_checkpointing=True
    )
    converted.requires_grad_(True)
    if weights == "kv":
        freeze_all_but_keys_and_values(converted)
    device = next(converted.parameters()).device
    losses: list[float] = []
    recompute(converted, settings)
    converted.train()
    try:
        stepper = _Stepper(converted, settings, steps, device)
        with stage("polishing", steps, "steps") as progress:

            def on_step(_: int, loss: float) -> None:
                losses.append(loss)
                progress.step()

            with torch.random.fork_rng():
                torch.manual_seed(seed)  # of dropout
                train_model(
                    stepper,
                    BatchStream(sequences, rows, seed=seed),
                    steps=steps,
                    loss_fn=_divergence(original),
                    on_step=on_step,
                )
        work = TokenWork.of(converted, sequences.shape[1], recomputed=True).hardware
        with_teacher = TokenWork.of(converted, sequences.shape[1], teacher=original.model)
    finally:
        converted.eval()
        converted.activation_checkpointing_disable()
        converted.requires_grad_(False)
    tokens = steps * rows * sequences.shape[1]
    seen = min(tokens, sequences.numel())
    return PolishWork(
        steps=steps,
        tokens=tokens,
        flops=work * tokens + (with_teacher.hardware - with_teacher.model) * seen,
        weights=weights,
        learning_rate=settings.learning_rate,
        first_loss=losses[0],
        last_loss=losses[-1],
    )


def _divergence(original: CachedTeacher) -> LossFunction:
    """Return the loss: KL(original ‖ model) of a batch."""

    def cost(logits: Tensor, labels: Tensor, guide: Tensor | None) -> Tensor:
        assert guide is not None
        return kl(logits, guide)

    def loss(model: Any, batch: Tensor, rows: int | None = None) -> Tensor:
        # One sequence at a time, so that a repeated one is recognised in any batch
        with torch.no_grad():
            finals = [original(row) for row in batch.split(1)]
        states = torch.cat([each.states for each in finals])
        reference = Final(states, finals[0].head, finals[0].vocabulary)
        return mean_cost(model, batch, cost, reference, rows)

    return loss


class _Stepper:
    """AdamW on float32 copies of the trained weights, with the schedule of a training.

    The loss of a float16 model is scaled, so that its small gradients are not lost; a scale with
    which they overflow is halved.
    """

    def __init__(
        self, model: Any, settings: TrainSettings, total: int, device: torch.device
    ) -> None:
        self._model = model
        self._settings = settings
        self._total = total
        self._device = device
        self._done = 0
        self._trained = [p for p in model.parameters() if p.requires_grad]
        for parameter in self._trained:
            parameter.data = parameter.data.clone()
        self._masters = [
            p if p.dtype == torch.float32 else p.detach().float().requires_grad_(True)
            for p in self._trained
        ]
        self._optimizer = torch.optim.AdamW(self._masters, settings.learning_rate, weight_decay=0.0)
        self._scale = _MOST_SCALE if any(p.dtype == torch.float16 for p in self._trained) else 1.0

    def step(self, batch: Tensor, loss_fn: LossFunction) -> float:
        loss, norm = self._gradients(batch, loss_fn)
        while self._scale > 1 and math.isfinite(loss) and not math.isfinite(norm):
            self._scale /= 2
            loss, norm = self._gradients(batch, loss_fn)
        if not math.isfinite(norm):
            return math.nan
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.rate(self._done, self._total)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._trained, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        self._done += 1
        return loss

    def _gradients(self, batch: Tensor, loss_fn: LossFunction) -> tuple[float, float]:
        """Give the float32 copies their clipped gradients; return the loss and the norm before."""
        self._optimizer.zero_grad()
        loss = loss_fn(self._model, batch.to(self._device))
        (loss * self._scale).backward()
        for master, parameter in zip(self._masters, self._trained, strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.float() / self._scale
                parameter.grad = None
                master.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._settings.max_grad_norm)
        return loss.item(), norm.item()
