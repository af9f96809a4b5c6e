"""Recomputation in the backward pass: the same losses and weights as without, in every family and kind of training."""

from __future__ import annotations

import copy
import shutil
from contextlib import closing
from typing import Any

import pytest
import torch
from parameters import extended
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention.conversion.convert import convert
from attention.families import families, family_of
from attention.plan import AttentionPlan, Composition, HeadShare, LayerPlan
from trainers.engine import TrainEngine
from trainers.loop import train_model
from trainers.losses import objective
from trainers.recomputation import compile_layers, recompute
from trainers.relaxations.stage import RelaxationSpec, relaxed_objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream

STEPS = 3
UNEVEN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
SHARED = AttentionPlan((LayerPlan.identity(4),) * 2, 8, (HeadShare(1, 1, 0, 3), HeadShare(1, 2, 0, 0)))
COMPOSED = AttentionPlan((LayerPlan.identity(4),) * 2, 8, composition=Composition())


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(0))


def trained(
    model: Any, ids: Tensor, spec: RelaxationSpec | None = None, **options: Any
) -> tuple[list[float], Any, int]:
    """Losses, weights, and how often an attention module ran."""
    settings = TrainSettings(**{"learning_rate": 3e-3, "micro_batch_size": 4, **options})
    relaxation = spec.install(model, 0, 0) if spec else None
    model = copy.deepcopy(model) if relaxation is None else relaxation.model
    groups = () if relaxation is None else relaxation.parameter_groups()
    losses: list[float] = []
    runs = [0]

    def count(*_: Any) -> None:
        runs[0] += 1

    family_of(model.config).attention_modules(model)[0].register_forward_hook(count)
    with closing(TrainEngine(model, settings, STEPS, groups)) as engine:
        loss_fn = objective()
        if relaxation is not None:
            loss_fn = relaxed_objective(relaxation, loss_fn, lambda: engine.steps_done)
        train_model(
            engine, BatchStream(ids, 8), steps=STEPS, loss_fn=loss_fn, on_step=lambda _, loss: losses.append(loss)
        )
        return losses, engine.weights(), runs[0]


def assert_alike(model: Any, ids: Tensor, mode: Any = True, **settings: Any) -> None:
    (losses, weights, runs), (again, others, more) = (
        trained(model, ids, activation_checkpointing=on, **settings) for on in (False, mode)
    )
    assert more == 2 * runs == 2 * STEPS * 2, "every pass runs once more"
    assert again == pytest.approx(losses, abs=1e-6)
    assert losses[0] != losses[-1]
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", [f if f in ("llama", "gpt2") else extended(f) for f in families()])
def test_every_family(tiny_model: Any, ids: Tensor, family: str) -> None:
    assert_alike(tiny_model(family), ids)


@pytest.mark.parametrize(
    ("family", "stage"),
    [
        (f, stage) if (f, stage) in {("llama", 1), ("qwen2", 3)} else extended(f, stage)
        for f in families()
        for stage in (1, 3)
    ],
)
def test_all_but_products(tiny_model: Any, ids: Tensor, family: str, stage: int) -> None:
    assert_alike(tiny_model(family), ids, "selective", zero_stage=stage)


@pytest.mark.parametrize("family", ["llama", "gpt2", extended("gpt_oss"), extended("olmoe")])
def test_no_product_is_made_twice(tiny_model: Any, ids: Tensor, family: str) -> None:
    """Counted operations of matrix products and attention, forward and backward."""

    def operations(mode: Any) -> int:
        model = convert(tiny_model(family), UNEVEN).train()
        recompute(model, TrainSettings(activation_checkpointing=mode))
        with FlopCounterMode(display=False) as counter:
            objective()(model, ids).backward()
        return counter.get_total_flops()

    assert operations(False) == operations("auto") <= operations("selective") < operations(True)
    if family in ("llama", "gpt2"):  # others compute all scores, which are recomputed
        assert operations("selective") == operations(False)


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler's backend for CPUs needs g++")
@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_layers_train_alike(tiny_model: Any, ids: Tensor, family: str, mode: Any) -> None:
    model = convert(tiny_model(family), UNEVEN)
    losses, weights, _ = trained(model, ids)
    again, others, _ = trained(model, ids, compile=True, activation_checkpointing=mode)
    assert again == pytest.approx(losses, abs=1e-5)
    assert set(others) == set(weights)
    for name, tensor in weights.items():
        if family == "gpt2" and name.endswith("k_proj.bias"):
            continue  # without rotary embeddings it moves no probability: its gradient is rounding, which Adam enlarges
        torch.testing.assert_close(others[name], tensor, atol=1e-4, rtol=0)


def test_each_layer_is_compiled_and_none_with_split_weights(tiny_model: Any) -> None:
    model = tiny_model("llama")
    before = set(model.state_dict())
    compile_layers(model)  # at its first run
    assert sum(module._compiled_call_impl is not None for module in model.modules()) == 2
    assert set(model.state_dict()) == before
    with pytest.raises(ValueError, match=r"compile needs zero_stage 0, 1 or 2, got 3"):
        TrainSettings(compile=True, zero_stage=3)
    with pytest.raises(ValueError, match=r"selective: a compiled layer chooses by itself"):
        TrainSettings(compile=True, activation_checkpointing="selective")


@pytest.mark.parametrize(
    "plan", [extended(UNEVEN, id="uneven"), extended(SHARED, id="shared"), pytest.param(COMPOSED, id="composed")]
)
@pytest.mark.parametrize("stage", [extended(1), 3])
def test_every_kind_of_converted_model(tiny_model: Any, ids: Tensor, plan: AttentionPlan, stage: int) -> None:
    assert_alike(convert(tiny_model("llama"), plan), ids, zero_stage=stage)


@pytest.mark.extended
@pytest.mark.parametrize("stage", [extended(1), 3])
def test_adapters(tiny_model: Any, ids: Tensor, stage: int) -> None:
    assert_alike(convert(tiny_model("llama"), UNEVEN), ids, zero_stage=stage, tuning="lora", lora_rank=4)


@pytest.mark.parametrize("name", [extended("lagrangian"), "hard_concrete"])
@pytest.mark.parametrize("stage", [extended(1), 3])
def test_relaxations(tiny_model: Any, ids: Tensor, name: str, stage: int) -> None:
    assert_alike(tiny_model("llama"), ids, spec=RelaxationSpec(name, (UNEVEN.to_json(),), STEPS), zero_stage=stage)


def test_dropout_is_that_of_the_first_pass(tiny_model: Any, ids: Tensor) -> None:
    assert_alike(tiny_model("llama", attention_dropout=0.3), ids)
