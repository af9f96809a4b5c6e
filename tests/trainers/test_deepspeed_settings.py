"""`train.deepspeed`: merged into what Headfold gives DeepSpeed, and refused where Headfold or DeepSpeed says no."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from parameters import extended
from torch import Tensor

from orchestrator.config.schema import ConfigError, check_training
from trainers.deepspeed_config import config_of
from trainers.deepspeed_keys import DECIDED
from trainers.engine import TrainEngine
from trainers.loop import train_model
from trainers.losses import objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream

STEPS = 3


@pytest.fixture
def engine(tiny_model: Any) -> Iterator[Callable[..., TrainEngine]]:
    created = []

    def make(**settings: Any) -> TrainEngine:
        created.append(TrainEngine(tiny_model("llama"), TrainSettings(**{"learning_rate": 3e-3, **settings}), STEPS))
        return created[-1]

    yield make
    for each in created:
        each.close()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))


def losses(engine: TrainEngine, ids: Tensor) -> list[float]:
    result: list[float] = []
    train_model(
        engine, BatchStream(ids, 8), steps=STEPS, loss_fn=objective(), on_step=lambda _, loss: result.append(loss)
    )
    return result


def test_it_is_merged_last_and_section_by_section() -> None:
    options = {
        "zero_optimization": {"overlap_comm": False},
        "optimizer": {"params": {"eps": 1e-6}},
        "steps_per_print": 7,
    }
    settings = TrainSettings(zero_stage=2, deepspeed=options)
    before, after = config_of(TrainSettings(zero_stage=2)), config_of(settings)
    assert after["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert after["optimizer"]["params"] == before["optimizer"]["params"] | {"eps": 1e-6}
    assert after["steps_per_print"] == 7
    changed = {"zero_optimization", "optimizer", "steps_per_print"}
    assert {key for key in after if after[key] != before.get(key)} == changed


def test_it_reaches_the_engine(engine: Any, ids: Tensor) -> None:
    settings = {"zero_optimization": {"reduce_bucket_size": 1234}, "optimizer": {"params": {"eps": 1e-3}}}
    changed, plain = engine(zero_stage=2, deepspeed=settings), engine(zero_stage=2)
    assert changed._engine.zero_reduce_bucket_size() == 1234
    assert {group["eps"] for group in changed._engine.optimizer.param_groups} == {1e-3}
    assert losses(changed, ids) != losses(plain, ids)


@pytest.mark.parametrize("stage", [2, extended(3)])
def test_an_optimiser_in_cpu_memory_trains_alike(engine: Any, ids: Tensor, stage: int) -> None:
    """Where there is no GPU, torch's Adam is used; on one it gives way to DeepSpeed's, which is compiled."""
    settings = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
    offloaded = engine(zero_stage=stage, deepspeed=settings)
    assert offloaded._engine.zero_use_cpu_optimizer()
    assert losses(offloaded, ids) == pytest.approx(losses(engine(zero_stage=stage), ids), abs=1e-5)


def test_adam_gives_way_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that only says that it has a GPU: the configuration is made, nothing is started."""

    def is_torchs(**settings: Any) -> bool:
        return config_of(TrainSettings(zero_stage=2, deepspeed=settings))["optimizer"]["params"]["torch_adam"]

    offload = {"offload_optimizer": {"device": "cpu"}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert is_torchs(zero_optimization=offload)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert is_torchs() and is_torchs(zero_optimization={"offload_optimizer": {"device": "none"}})
    assert not is_torchs(zero_optimization=offload)
    assert not is_torchs(optimizer={"params": {"torch_adam": False}})


def test_adam_is_fused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that only says that it has a GPU: the configuration is made, nothing is started."""

    def fused(device: Any = "auto", **params: Any) -> Any:
        settings = TrainSettings(device=device, deepspeed={"optimizer": {"params": params}})
        return config_of(settings)["optimizer"]["params"].get("fused")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fused() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fused() is True
    assert [fused("cpu"), fused(fused=False), fused(foreach=True), fused(torch_adam=False)] == [None, False, None, None]


@pytest.mark.parametrize("stage", [1, extended(0), extended(3)])
def test_a_fused_adam_trains_and_resumes_alike(engine: Any, ids: Tensor, tmp_path: Path, stage: int) -> None:
    """torch's fused kernel, which the CPU has too."""
    settings = {"optimizer": {"params": {"fused": True}}}
    fused = engine(zero_stage=stage, deepspeed=settings)
    whole = losses(fused, ids)
    assert whole == pytest.approx(losses(engine(zero_stage=stage), ids), abs=1e-5)
    fused.save(tmp_path)
    on = engine(zero_stage=stage, deepspeed=settings)
    on.load(tmp_path)
    states = on._engine.basic_optimizer.state
    assert states
    assert all(state["step"].device == p.device and state["step"].dtype == torch.float32 for p, state in states.items())
    for _ in range(2):  # the first loss is of the weights alone, the second of the moments too
        assert on.step(ids, objective()) == fused.step(ids, objective())


@pytest.mark.parametrize("name", DECIDED)
def test_what_headfold_decides_is_refused_with_the_setting_to_use(name: str) -> None:
    given: Any = 1
    for key in reversed(name.split(".")):
        given = {key: given}
    with pytest.raises(ValueError, match=f"{name} is decided by Headfold; .*(train|AdamW)"):
        TrainSettings(deepspeed=given)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"zero_optimisation": {}}, r"unknown key \(did you mean zero_optimization\?\); allowed here: aio, "),
        ({"optimizer": {"params": {"epsilon": 1}}}, "optimizer.params.epsilon: unknown key"),
        ({"optimizer": {"params": {"eps": "small"}}}, "optimizer.params.eps: expected float, got 'small'"),
        ({"prescale_gradients": 1}, "prescale_gradients: expected bool, got 1"),
        ({"zero_optimization": True}, "zero_optimization: expected keys and values, got True"),
        ({"aio": {"block_size": torch.float32}}, "input was not a valid JSON value"),
    ],
)
def test_what_there_is_not_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(deepspeed=wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"zero_optimization": {"overlap_com": False}}, "overlap_com: got False; Extra inputs are not permitted"),
        ({"zero_optimization": {"reduce_bucket_size": "large"}}, "reduce_bucket_size: got 'large'; Input should be"),
        ({"bf16": {"immediate": True}}, "immediate: got True; Extra inputs"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "mics_shard_size' is no longer supported"),
        ({"optimizer": {"params": {"bias_correction": False}}}, "torch_adam=false too"),
        ({"communication_data_type": "fp9"}, "train.deepspeed: .*fp9|Invalid communication_data_type"),
    ],
)
def test_what_deepspeed_refuses_is_reported_before_anything_starts(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_training(TrainSettings(num_workers=4, deepspeed=wrong))


def test_what_deepspeed_takes_passes() -> None:
    settings: Any = {"zero_optimization": {"offload_param": {"device": "cpu"}, "overlap_comm": True}}
    check_training(TrainSettings(num_workers=4, zero_stage=3, dtype="bfloat16", deepspeed=settings))


def test_settings_with_it_are_plain_values() -> None:
    created = [TrainSettings(deepspeed={"zero_optimization": {"sub_group_size": n}}) for n in (10, 10, 20)]
    assert len({*created}) == 2
    assert TrainSettings(**json.loads(json.dumps(created[0].model_dump()))) == created[0]


def test_a_training_checkpoint_knows_what_changes_its_files(engine: Any, tmp_path: Path) -> None:
    engine(deepspeed={"zero_optimization": {"reduce_bucket_size": 1000}}).save(tmp_path)
    engine().load(tmp_path)
    with pytest.raises(ValueError, match="'round_robin_gradients': True"):
        engine(deepspeed={"zero_optimization": {"round_robin_gradients": True}}).load(tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("stage", [2, extended(3)])
def test_gradients_in_bfloat16_are_summed_in_float32(tiny_model: Any, stage: int) -> None:
    """Against the gradients of 64 passes of one sequence, as they are in bfloat16, summed in float64."""
    ids = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(0))
    model = tiny_model("llama").bfloat16()
    expected = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for row in ids:
        model.zero_grad()
        (objective()(model, row[None]) / len(ids)).backward()
        for name, p in model.named_parameters():
            expected[name] += p.grad
    norm = torch.cat([grad.flatten() for grad in expected.values()]).norm()

    def error(**given: Any) -> float:
        options: dict[str, Any] = {"batch_size": 64, "micro_batch_size": 1, "max_grad_norm": 1e9}
        settings = TrainSettings(dtype="bfloat16", zero_stage=stage, deepspeed=given, **options)
        with closing(TrainEngine(tiny_model("llama").bfloat16(), settings, STEPS)) as built:
            result: dict[str, Tensor] = {}
            take_step = built._engine.step

            def step() -> None:
                if built._engine.is_gradient_accumulation_boundary():
                    result.update((n, safe_get_full_grad(p)) for n, p in built._engine.module.named_parameters())
                take_step()

            built._engine.step = step
            built.step(ids, objective())
        apart = [(result[name].double() - grad).flatten() for name, grad in expected.items()]
        return float(torch.cat(apart).norm() / norm)

    assert error() < 1e-5 < 3e-3 < error(data_types={"grad_accum_dtype": "bf16"})


def test_where_gradients_are_summed_in_float32() -> None:
    def summed(**settings: Any) -> Any:
        return config_of(TrainSettings(**settings)).get("data_types", {}).get("grad_accum_dtype")

    assert [summed(dtype="bfloat16", zero_stage=stage) for stage in (1, 2, 3)] == [None, "fp32", "fp32"]
    assert summed(zero_stage=3) is None
    assert summed(dtype="bf16", zero_stage=2, deepspeed={"data_types": {"grad_accum_dtype": "bf16"}}) == "bf16"
    assert summed(dtype="bf16", zero_stage=2, deepspeed={"bf16": {"bf16_master_weights_and_grads": True}}) is None
