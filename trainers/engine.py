"""A model, its optimiser, and a step over all workers: DeepSpeed's engine."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainers import resharding, zero
from trainers.adapters import add_adapters
from trainers.deepspeed_config import DECAY, LAYOUT, bytes_per_trained, config_of, layout_of
from trainers.freezing import freeze_all_but_keys_and_values
from trainers.loop import CountedLoss, LossFunction, ParameterGroup
from trainers.recomputation import compile_layers, recompute
from trainers.settings import TrainSettings

TAG = "engine"
SCALE = "rate_scale"  # in a group of the optimiser: its learning rate over the settings'
MOST_SKIPPED = 3
"""Steps in a row whose gradients may be without a finite norm; DeepSpeed leaves them out."""
_OF_SETTINGS = (SCALE, "weight_decay", "betas")
"""Options of the optimiser's groups that a checkpoint does not change."""


class TrainEngine(zero.EngineOwner):
    """DeepSpeed's engine behind five verbs. All workers must make every call together.

    `total_steps` fixes the learning-rate schedule; step 0 is at `schedule_offset` of it, for a
    training that is one part of a longer one (below 0: the schedule begins later, with the state
    that `load` resumes from). Parameters in `groups` have separate rates on the same schedule.
    Parameters that `settings.tuning` excludes are frozen here; with LoRA the model is given its
    adapters. Without a process group, as in a notebook, a group of one is made. `decay_everything`:
    as older trainings, before vectors and embeddings were excluded from weight decay, to resume
    from one of their checkpoints.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainSettings,
        total_steps: int,
        groups: Sequence[ParameterGroup] = (),
        *,
        schedule_offset: int = 0,
        decay_everything: bool = False,
    ) -> None:
        if schedule_offset > total_steps:
            raise ValueError(
                f"expected schedule_offset <= total_steps, got {schedule_offset} and {total_steps}"
            )
        zero.group_of_one()
        if dist.get_world_size() != settings.num_workers:
            raise ValueError(
                f"settings say num_workers {settings.num_workers}, the group has "
                f"{dist.get_world_size()}"
            )
        self.settings = settings
        self.total_steps = total_steps
        self.schedule_offset = schedule_offset
        self._skipped = 0
        self._norm: Tensor | None = None
        self.steps_done = 0  # by this engine and those that it continues, from the offset on
        recompute(model, settings)
        self._layout = layout_of(settings)
        if decay_everything:
            self._layout.pop(DECAY, None)
        self._adapters = None
        if settings.tuning == "lora":
            generator = torch.Generator().manual_seed(settings.seed)
            self._adapters = add_adapters(
                cast(Any, model), settings.lora_rank, settings.lora_alpha, generator
            )
        if settings.tuning == "kv":
            freeze_all_but_keys_and_values(cast(Any, model))
        if settings.compile:
            compile_layers(cast(Any, model))
        self._engine = zero.initialize(
            model,
            config_of(settings),
            _parameter_groups(model, settings, groups, decay_everything=decay_everything),
        )
        zero.agree_on_chunks(self._engine.device)

    @property
    def model(self) -> nn.Module:
        """The model, to evaluate in place.

        With ZeRO 3 all workers must run each forward pass together.
        """
        return self._engine.module

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        return self.settings.rate(self.schedule_offset + self.steps_done, self.total_steps)

    @property
    def last_rate(self) -> float:
        """Learning rate of the last step; that of the next one before the first."""
        return self.settings.rate(
            self.schedule_offset + max(0, self.steps_done - 1), self.total_steps
        )

    @property
    def gradient_norm(self) -> float | None:
        """The gradient norm of the last step, over all workers, before clipping; None before it."""
        norm = self._engine.get_global_grad_norm()
        norm = self._norm if norm is None else norm
        return None if norm is None else float(norm)

    def step(self, batch: Tensor, loss_fn: LossFunction) -> float:
        """One optimiser step on this worker's rows `[B / W, T]`.

        The loss before it, the mean over all B rows.

        Where W does not divide B some workers have one row more than others: each counts by its
        rows. A `CountedLoss` is the mean over what it counts in all B rows. When the loss is not
        finite the weights are not changed, nor are they by gradients that are not: after
        `MOST_SKIPPED` such steps in a row the loss returned is not finite either, with ZeRO 0 after
        the first.
        """
        rank = dist.get_rank()
        torch.manual_seed(_step_seed(self.settings.seed, self.steps_done, rank))
        self._engine.train()
        for group in self._engine.optimizer.param_groups:
            group["lr"] = self.rate * group[SCALE]
        rows = self.settings.batch_size
        passes = self.settings.gradient_accumulation_steps
        workers = dist.get_world_size()
        if len(batch) not in (rows // workers, -(-rows // workers)):
            raise ValueError(
                f"a worker takes {rows} / {workers} sequences per step, got {len(batch)}"
            )
        mean = torch.zeros((), dtype=torch.float64, device=self.device)
        batch = batch.to(self.device)
        most = [len(part) for part in torch.arange(-(-rows // workers)).tensor_split(passes)]
        pieces = batch.tensor_split(passes)
        weights = self._weights(pieces, loss_fn)
        for index, piece in enumerate(pieces):
            # Workers with a row less take part with a copy, which does not count: with ZeRO 3 all
            # must call a head, whose calls depend on the number of rows, equally often
            copies = batch[:1].expand(most[index] - len(piece), -1)
            loss = loss_fn(self._engine, torch.cat([piece, copies]), len(piece))
            mean += loss.detach().double() * weights[index]
            if index == passes - 1:
                dist.all_reduce(mean)
                if not math.isfinite(mean.item()):
                    return mean.item()
            # DeepSpeed takes the mean over passes and workers
            self._engine.backward(loss * (weights[index] * passes * workers))
            if index == passes - 1 and self.settings.zero_stage == 0:
                # Of which DeepSpeed says nothing where the optimiser is torch's
                gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
                self._norm = nn.utils.get_total_norm(gradients) if gradients else None
                if self._norm is not None and not math.isfinite(self._norm.item()):
                    return math.nan  # the step would make the weights so, too
            self._engine.step()
        self.steps_done += 1
        # Decided by a norm over all workers, so alike on each
        self._skipped = 0 if self._engine.was_step_applied() else self._skipped + 1
        return math.nan if self._skipped >= MOST_SKIPPED else mean.item()

    def _weights(self, pieces: Sequence[Tensor], loss_fn: LossFunction) -> list[float]:
        """Return the share of each piece of this worker in the mean of all workers' rows."""
        if not isinstance(loss_fn, CountedLoss):
            return [len(piece) / self.settings.batch_size for piece in pieces]
        counts = [loss_fn.count(piece) for piece in pieces]
        total = torch.tensor(sum(counts), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [count / max(1.0, total.item()) for count in counts]

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes that `save` writes, of all workers together."""
        trained = sum(
            getattr(p, "ds_numel", p.numel()) for p in self.model.parameters() if p.requires_grad
        )
        return trained * bytes_per_trained(self.settings)

    def save(self, folder: str | Path, client_state: dict[str, Any] | None = None) -> None:
        """Save weights, optimiser state, position and `client_state`, each worker its own share.

        `client_state` is plain values. Parameters frozen by `settings.tuning` are left out: `load`
        is for an engine of the same model.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "steps_done": self.steps_done,
            "client": client_state if client_state is not None else {},
        }
        with contextlib.redirect_stdout(None):  # DeepSpeed prints; errors still come as exceptions
            frozen = self.settings.tuning != "full"
            self._engine.save_checkpoint(
                str(folder), tag=TAG, client_state=state, exclude_frozen_parameters=frozen
            )
        if dist.get_rank() == 0:
            layout = {"num_workers": self.settings.num_workers} | self._layout
            (folder / LAYOUT).write_text(json.dumps(layout))

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Continue where `save` was called, exactly on as many workers; returns its `client_state`.

        Raises:
            ValueError: When the checkpoint was written with other settings of ZeRO, another dtype
                or other adapters.
        """
        file = Path(folder) / LAYOUT
        if not file.is_file():
            raise ValueError(f"expected a training checkpoint in {folder}, found no {LAYOUT} there")
        written = json.loads(file.read_text())
        workers = written.pop("num_workers")
        if written != self._layout:
            raise ValueError(
                f"training checkpoint {folder} was written with {written}, these settings are "
                f"{self._layout}; use the same, "
                "or start from the finished weights instead (model_dir) with a fresh optimiser"
            )
        anew = self.settings.zero_stage > 0 and workers != dist.get_world_size()
        source = contextlib.nullcontext(folder)
        if anew:
            source = resharding.for_any_number(folder, TAG, zero.write_universal)
        group_options = [
            {key: group[key] for key in _OF_SETTINGS if key in group}
            for group in self._engine.optimizer.param_groups
        ]
        clipping = getattr(self._engine.optimizer, "clip_grad", None)
        with source as readable, contextlib.redirect_stdout(None):
            self._engine._config.load_universal_checkpoint = anew
            whole = self.settings.tuning == "full"  # else what is frozen is the model's already
            path, state = self._engine.load_checkpoint(
                str(readable), tag=TAG, load_module_strict=whole
            )
        for group, options in zip(self._engine.optimizer.param_groups, group_options, strict=True):
            # As the settings say; with ZeRO 3 split anew all groups have the first one's [0.19].
            group |= options
        if clipping is not None:  # with ZeRO 1 and 2 it is that of the checkpoint [0.19]
            self._engine.optimizer.clip_grad = clipping
        zero.restore_counts(self._engine.basic_optimizer)
        if path is None:
            raise ValueError(
                f"expected a training checkpoint with tag {TAG!r} in {folder}, found none to read"
            )
        self.steps_done = int(state["steps_done"])
        return state["client"]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight and persistent buffer by name, whole and on the CPU, as it is used.

        All workers must go through them together, and only rank 0 is given any.

        With bfloat16 these are the weights that the model computes with, not the optimiser's
        float32 copies. Adapters are merged: names and shapes are those of the model that was given.
        """
        state = self._engine.module.state_dict(keep_vars=True)
        adapters = self._adapters
        sources = {name: (name,) for name in state} if adapters is None else adapters.sources(state)
        for name, parts in sources.items():
            tensors = [state[part] for part in parts]
            with torch.no_grad(), zero.gathered_parameters(tensors):
                if dist.get_rank() != 0:
                    continue
                whole = tensors[0] if adapters is None else adapters.merged(name, tensors)
                copied = whole.detach().to("cpu", copy=True)
            yield name, copied

    def weights(self) -> dict[str, Tensor]:
        """All `tensors` at once, on rank 0; an empty dict on the others."""
        return dict(self.tensors())


def _step_seed(seed: int, step: int, rank: int) -> int:
    """Return a seed for each step and worker, so that dropout does not depend on resumes."""
    return ((seed * 1_000_003 + step) * 65_537 + rank) % 2**64  # all that a generator takes


def _parameter_groups(
    model: nn.Module,
    settings: TrainSettings,
    groups: Sequence[ParameterGroup],
    *,
    decay_everything: bool,
) -> list[dict[str, Any]]:
    """Return the optimiser's groups.

    Those given, after all other parameters that are trained: the matrices that decay, and what does
    not. Without weight decay these are one group.
    """
    special = {id(p) for group in groups for p in group.parameters}
    trained = [p for p in model.parameters() if p.requires_grad]
    if missing := special - {id(p) for p in trained}:
        raise ValueError(
            f"{len(missing)} parameters of the groups are not parameters of the model that are "
            f"trained"
        )
    rest = [p for p in trained if id(p) not in special]
    decay = settings.weight_decay
    undecayed = set() if decay_everything or not decay else _undecayed(model)
    parts = [
        ([p for p in rest if id(p) not in undecayed], decay),
        ([p for p in rest if id(p) in undecayed], 0.0),
    ]
    result = [
        {"params": parameters, "weight_decay": decay, SCALE: 1.0}
        for parameters, decay in parts
        if parameters
    ]
    for group in groups:
        scale, decay = group.options(settings.learning_rate)
        result.append({"params": list(group.parameters), "weight_decay": decay, SCALE: scale})
    return result


def _undecayed(model: nn.Module) -> set[int]:
    """Return the ids of parameters that weight decay leaves alone.

    Vectors (norms, sinks), biases of any shape, and embeddings.
    """
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    return embeddings | {
        id(parameter)
        for name, parameter in model.named_parameters()
        # Of one that ZeRO 3 has split, `shape` is that of nothing.
        if len(getattr(parameter, "ds_shape", parameter.shape)) < 2 or name.endswith("bias")
    }
