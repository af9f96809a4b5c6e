"""Local fit: each converted attention layer is trained alone towards the original layer's output.

The inputs are those of the *original* model at that layer, so layers do not depend on each other.
In the same time, many steps on small batches reach a lower loss than few steps on all tokens, and
queries and keys need larger steps than values and output where heads share keys
(benchmarks/LOG.md).

Legend: N sequences, T tokens, D model dim, B sequences per step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.axes import Knob
from attention.base.products import tensor_cores
from attention.base.progress import stage
from attention.conversion.refinement.capture import Record, split_held_out
from attention.conversion.refinement.healing import HEAL_KNOBS, heal
from attention.conversion.refinement.original import Original, Text
from attention.conversion.refinement.parallel import ONE_AT_A_TIME, each_layer, largest
from attention.conversion.refinement.refine import REFINEMENT, FitWork, LayerFit
from attention.conversion.refinement.windows import attended, cache_name, uncached, windows
from attention.families import family_of
from attention.modeling.model_classes import plan_of
from attention.modeling.running import entered_by, entering

FIT_STEPS = 720
FIT_RATE = 0.5
STEP_TOKENS = 256
FIT_TOKENS = 32_768
FIT_KNOBS = (
    Knob(
        "fit_steps",
        "int",
        "Adam steps per layer; layers beyond six share those of six, or have a quarter each",
        1,
        100_000,
    ),
    Knob(
        "fit_rate",
        "log_float",
        "largest step: relative change of the logits at most, where two heads share a key",
        1e-4,
        1e2,
    ),
    Knob(
        "step_tokens",
        "int",
        "tokens per step: whole sequences, or some positions of a longer one",
        1,
        2**11,  # of what runs at once
    ),
    Knob("fit_tokens", "int", "calibration tokens that are loaded into memory and fitted on", 2),
)
FIT_DECAY = 1 / 3
"""In a local fit of a layer with fused keys the error falls as the number of steps to the power
-FIT_DECAY, from 60 to 480 steps (benchmarks/LOG.md: medians of three checkpoints)."""
FEW_LAYERS = 6
"""Layers that get the same number of steps each; more of them share the steps of so many."""
_LEAST_SHARE = 1 / 4
"""Mean number of steps of many layers, as a share of those of few, at least. On a public model of
30 layers a quarter of the steps ends 1.15 times as far from the original's output
(benchmarks/LOG.md)."""
SHORT_FIT_WINDOWS = 2
"""Windows of each sequence that a short fit for planning looks at. Distances among layers are as
with all windows, at half of the time (benchmarks/LOG.md)."""
BETAS = (0.8, 0.9)
# Projections and norms of queries and keys, which every layer with fused keys has apart.
_LOGITS = ("q_", "k_")
WARMUP = 0.05
RETRIES = 2
SMALLER = 0.25
CHECK_EVERY = 60  # steps; and at least once, at the end: the best state seen is what stays
CHECKS = 4  # at most

Report = Callable[[], None]


@dataclass(frozen=True)
class LayerTask:
    """Inputs and targets that one layer is fitted to, in float32.

    `inputs`, `targets` `[N, T, D]` to fit on and `check` to judge by.

    `example` is a record of B sequences: its other arguments serve for any B sequences of as many
    tokens. A step looks at one of the `parts` of their positions, (first, end) each, with all keys
    before it.
    """

    inputs: Tensor
    targets: Tensor
    example: Record
    check: tuple[Record, ...]
    parts: Sequence[tuple[int, int]]

    @property
    def batch(self) -> int:
        return self.example.output.shape[0]

    @property
    def positions(self) -> float:
        """Mean number of tokens of a sequence that a step uses."""
        return sum(end - first for first, end in self.parts) / len(self.parts)

    @property
    def shortened(self) -> LayerTask:
        """The same with the first windows of each sequence alone, which cost least."""
        return replace(self, parts=self.parts[:SHORT_FIT_WINDOWS])

    @classmethod
    def of(cls, texts: FitTexts, layer: int) -> LayerTask:
        """Return the inputs and targets of `layer` in the original model, on its texts."""
        records = records_in_float(texts.fit, layer)
        inputs = torch.cat([entering(record.args, record.kwargs) for record in records])
        targets = torch.cat([record.output for record in records])
        check = records_in_float(texts.check, layer)
        example = check[0] if texts.step is texts.check else records_in_float(texts.step, layer)[0]
        parts = windows(inputs.shape[1], texts.positions)
        if cache_name(texts.fit.original.modules[layer]) is None:
            parts = [(0, inputs.shape[1])]
        return cls(inputs, targets, example, check, parts)


@dataclass(frozen=True)
class FitTexts:
    """Return the batches that layers are fitted on, and those that the fit is checked on.

    `positions` of each sequence a step looks at, at most.
    """

    fit: Text
    step: Text
    check: Text
    positions: int

    @classmethod
    def of(cls, original: Original, sequences: Tensor, step_tokens: int = STEP_TOKENS) -> FitTexts:
        """Split `sequences` `[N, T]` into those to fit on and those of the check.

        A step takes about `step_tokens`.
        """
        fit, check = split_held_out(sequences)
        batch = min(sequences_a_step(sequences.shape[1], step_tokens), len(fit))
        judged = original.on(check)
        step = (
            judged if judged.batch_size == batch <= len(check) else original.on(fit[:batch], batch)
        )
        return cls(original.on(fit), step, judged, step_tokens)


def sequences_a_step(length: int, step_tokens: int = STEP_TOKENS) -> int:
    """Sequences of `length` tokens that have at least `step_tokens` together."""
    return -(-step_tokens // length)


def steps_in_all(steps: int, layers: int) -> float:
    """Return the Adam steps of the local fits of `layers` layers together.

    `steps` is what each of a few layers gets.
    """
    return steps * min(layers, max(FEW_LAYERS, _LEAST_SHARE * layers))


def shared_steps(steps: int, increases: Sequence[float]) -> list[int]:
    """Adam steps of each layer where `increases` of the loss are expected of them.

    More for those that cost most.

    Up to `FEW_LAYERS` layers that cost something get `steps` each; more of them share
    `steps_in_all`. The sum of c n^-p over layers is least, for a number of steps in all, where n is
    as c to the power 1 / (1 + p). A layer gets at least `CHECK_EVERY` steps, or `steps` if these
    are fewer, and at most twice `steps`; one that costs nothing is not counted, since it is not
    fitted.
    """
    costs = [max(increase, 0.0) for increase in increases]
    fitted = sum(cost > 0 for cost in costs)
    if fitted <= FEW_LAYERS:
        return [steps] * len(costs)
    weights = [cost ** (1 / (1 + FIT_DECAY)) for cost in costs]
    scale = steps_in_all(steps, fitted) / sum(weights)
    return [
        min(2 * steps, max(min(steps, CHECK_EVERY), round(scale * weight))) for weight in weights
    ]


def records_in_float(text: Text, layer: int) -> tuple[Record, ...]:
    """Return the records of a layer (`Text.at`) in float32."""
    return tuple(_in_float(record) for record in text.at(layer))


def _float(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    return tuple(_float(item) for item in value) if isinstance(value, tuple) else value


def _in_float(record: Record) -> Record:
    kwargs = {name: _float(value) for name, value in record.kwargs.items()}
    return Record(_float(record.args), kwargs, record.output.float(), record.stream, None)


def _call(module: nn.Module, record: Record, inputs: Tensor | None = None) -> Tensor:
    args = record.args
    kwargs = uncached(record)
    if inputs is not None:
        args, kwargs = entered_by(inputs, args, kwargs)
    output = module(*args, **kwargs)
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def output_errors(module: nn.Module, records: Sequence[Record]) -> Iterator[Tensor]:
    """Attention - target `[B, T, D]` of each record."""
    for record in records:
        yield _call(module, record) - record.output


def layer_error(module: nn.Module, records: Sequence[Record]) -> float:
    """Return `|attention - target|^2 / |target|^2` over all records."""
    wrong = sum(error.double().square().sum() for error in output_errors(module, records))
    power = sum(r.output.double().square().sum() for r in records)
    return float(wrong / power)


def _rates(module: nn.Module, shared_by: float) -> dict[nn.Parameter, float]:
    """Return the largest step of each parameter, for a rate of 1.

    A step as large as the parameter's size changes an output by its own size if all weights of a
    row move along. Queries and keys have the more to change the more heads share a key: they get
    root(`shared_by` / 2) of it, all else half of it. The size of a matrix of F inputs is its root
    mean square over the root of F. A bias has that of its matrix, a norm's weight, which has none,
    the mean of the matrices.
    """
    sizes = (
        (p, float(p.detach().square().mean().sqrt())) for p in module.parameters() if p.dim() > 1
    )
    matrices = {p: size / math.sqrt(p[0].numel()) for p, size in sizes}
    mean = sum(matrices.values()) / len(matrices)
    rates: dict[nn.Parameter, float] = {}
    for name, part in module.named_modules():
        share = math.sqrt(shared_by / 2) if name.startswith(_LOGITS) else 0.5
        siblings = [matrices[p] for p in part.parameters(recurse=False) if p in matrices]
        rates |= {
            p: matrices.get(p, (siblings or [mean])[0]) * share
            for p in part.parameters(recurse=False)
        }
    return rates


def _batches(count: int, batch: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the indices of the sequences of each step: all in random order, then all again."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        while len(order) < batch:
            order = torch.cat([order, torch.randperm(count, generator=generator)])
        yield order[:batch]
        order = order[batch:]


def fit_module(
    module: nn.Module,
    task: LayerTask,
    steps: int,
    rate: float,
    generator: torch.Generator,
    *,
    shared_by: float,
    wide: bool = False,
    report: Report = lambda: None,
) -> tuple[float, float, FitWork]:
    """Train `module` (float32) in place.

    It ends in the best state met on the held-out records, the first included. `report` is called
    after each step.

    Adam with a short linear warm-up and a cosine to 0. Where that ends no better than it began, the
    steps were too large for this layer: it is tried again with smaller ones, `RETRIES` times at
    most. Where only values are fused, and where heads are wide, the first rate is at most the root
    of the squared error before the fit, relative to the target's power: a larger one only adds to
    that error (benchmarks/LOG.md).

    Args:
        shared_by: Key heads of the original for each that the converted layer keeps; 1 where no
            keys are fused.
        wide: Whether the converted layer's heads are wide.

    Returns:
        The held-out error before and after, and the work.
    """
    before = layer_error(module, task.check)
    rate = min(rate, math.sqrt(before)) if wide or shared_by == 1 else rate
    start = copy.deepcopy(module.state_dict())
    sizes = _rates(module, shared_by)
    best = before
    steps_made = 0
    for attempt in range(1 + RETRIES):
        rates = {p: rate * SMALLER**attempt * size for p, size in sizes.items()}
        best, more = _train(module, task, steps, rates, generator, before, report)
        steps_made += more
        if best < before:
            break
        module.load_state_dict(start)
    tokens = round(steps_made * task.batch * task.positions)
    return (
        before,
        best,
        FitWork(steps_made, tokens, 6.0 * tokens * sum(p.numel() for p in module.parameters())),
    )


def _train(
    module: nn.Module,
    task: LayerTask,
    steps: int,
    rates: Mapping[nn.Parameter, float],
    generator: torch.Generator,
    before: float,
    report: Report,
) -> tuple[float, int]:
    """Lowest held-out error, the module being left in that state, and the steps made.

    Stops halfway if the error is not below `before` by then.

    Args:
        rates: The largest of each parameter.
    """
    best = before
    best_state = copy.deepcopy(module.state_dict())
    steps_made = 0
    module.requires_grad_(True)
    optimiser = torch.optim.Adam(
        [{"params": [p], "lr": 0.0} for p in rates], betas=BETAS, fused=True
    )
    power = float(task.targets.square().mean())
    looks = min(CHECKS, max(1, steps // CHECK_EVERY))
    checks = {steps * (i + 1) // looks for i in range(looks)}
    units = len(task.inputs) * len(task.parts)  # a batch of several sequences has one part
    for step, index in enumerate(_batches(units, task.batch, steps, generator)):
        now = (
            min(1.0, (step + 1) / max(1.0, WARMUP * steps))
            * (1 + math.cos(math.pi * step / steps))
            / 2
        )
        for group, rate in zip(optimiser.param_groups, rates.values(), strict=True):
            group["lr"] = now * rate
        with torch.enable_grad():
            output, target = at_a_step(module, task, index)
            loss = (output - target).square().mean() / power
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        report()
        steps_made = step + 1
        if steps_made in checks:
            error = layer_error(module, task.check)
            if error < best:
                best = error
                best_state = copy.deepcopy(module.state_dict())
            elif steps_made >= steps // 2 and best == before:
                break
    module.load_state_dict(best_state)
    for p in module.parameters():
        p.requires_grad_(False).grad = None
    return best, steps_made


def at_a_step(module: nn.Module, task: LayerTask, index: Tensor) -> tuple[Tensor, Tensor]:
    """Attention and target at one step: `index` of sequences, or of a part of one."""
    if len(task.parts) == 1:
        return _call(module, task.example, task.inputs[index]), task.targets[index]
    sequence, part = divmod(int(index), len(task.parts))
    first, end = task.parts[part]
    output = attended(module, task.example, task.inputs[sequence : sequence + 1], first, end)
    return output, task.targets[sequence : sequence + 1, first:end]


def fit_layer(
    converted: PreTrainedModel,
    texts: FitTexts,
    layer: int,
    number: int,
    steps: int,
    rate: float,
    report: Report,
) -> LayerFit:
    """Train one attention layer of `converted` towards the original's, in float32.

    It is put in place if that helps on held-out sequences.

    Args:
        converted: The model that is changed.
        texts: What the original does on the sequences to fit on and to judge by.
        layer: Number of the layer in `converted`.
        number: Number of the layer in its checkpoint, by which it is seeded.
        steps: Adam steps.
        rate: Peak learning rate.
        report: Called after each step.

    Raises:
        ValueError: For a model with shared heads, whose weights serve other layers as well.
    """
    plan = plan_of(converted)
    converted_plan = plan_of(texts.fit.original.model)
    if shares := plan.head_shares:
        raise ValueError(
            f"a local fit trains each layer alone, and {len(shares)} heads of this model are "
            f"shared among layers; "
            "train the whole model, or use refinement=heal"
        )
    if plan.layers[layer] == converted_plan.layers[layer]:
        return LayerFit("fit", number, 0.0, 0.0)  # there is nothing to fit
    module = family_of(converted.config).attention_modules(converted)[layer]
    with ONE_AT_A_TIME:
        task = LayerTask.of(texts, layer)
    copied = copy.deepcopy(module).float().eval()
    shared_by = converted_plan.layers[layer].key_slices / plan.layers[layer].key_slices
    generator = torch.Generator().manual_seed(number)
    before, after, work = fit_module(
        copied,
        task,
        steps,
        rate,
        generator,
        shared_by=shared_by,
        wide=plan.layers[layer].is_wide,
        report=report,
    )
    result = LayerFit("fit", number, before, after, work)
    if result.improves:
        with torch.no_grad():
            for p, fitted in zip(module.parameters(), copied.parameters(), strict=True):
                p.copy_(fitted)
    return result


@REFINEMENT.part(
    "fit_heal",
    source="ours (docs/methods.md, section 6): local fit, then heal",
    knobs=FIT_KNOBS + HEAL_KNOBS,
    needs=("sequences", "increases"),
    passes_to=heal,
)
def fit_heal(
    original: Original,
    converted: PreTrainedModel,
    sequences: Tensor,
    *,
    first: int = 0,
    layer_steps: Sequence[int] | None = None,
    fit_steps: int = FIT_STEPS,
    fit_rate: float = FIT_RATE,
    step_tokens: int = STEP_TOKENS,
    fit_tokens: int = FIT_TOKENS,
    **knobs: Any,
) -> tuple[LayerFit, ...]:
    """Fit every layer locally, small ones side by side, then heal from the first layer to the last.

    Args:
        layer_steps: Steps of each layer, instead of `fit_steps`.
    """
    texts = FitTexts.of(
        original, sequences[: max(2, fit_tokens // sequences.shape[1])], step_tokens
    )
    modules = family_of(converted.config).attention_modules(converted)
    before = plan_of(original.model).layers
    after = plan_of(converted).layers
    requested_steps = layer_steps or [fit_steps] * len(modules)
    # A layer that keeps all heads is not fitted, and must not count as progress.
    steps = [
        count if after[layer] != before[layer] else 0 for layer, count in enumerate(requested_steps)
    ]

    def fit(layer: int) -> LayerFit:
        done = 0

        def report() -> None:
            nonlocal done
            if done < steps[layer]:  # a second attempt repeats the same steps
                done += 1
                progress.step()

        fitted = fit_layer(converted, texts, layer, first + layer, steps[layer], fit_rate, report)
        progress.step(steps[layer] - done)
        return fitted

    with (
        tensor_cores(converted.device, converted.dtype),
        stage("fitting layers", sum(steps), "steps") as progress,
    ):
        fits = each_layer(len(modules), fit, largest(modules), converted.device)
    return (*fits, *heal(original, converted, sequences, first=first, **knobs))
