"""`train.deepspeed`: merged into what Headfold gives DeepSpeed, and refused where Headfold or DeepSpeed says no."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
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
    made = []

    def make(**settings: Any) -> TrainEngine:
        made.append(TrainEngine(tiny_model("llama"), TrainSettings(**{"learning_rate": 3e-3, **settings}), STEPS))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))


def losses(engine: TrainEngine, ids: Tensor) -> list[float]:
    found: list[float] = []
    train_model(
        engine, BatchStream(ids, 8), steps=STEPS, loss_fn=objective(), on_step=lambda _, loss: found.append(loss)
    )
    return found


def test_it_is_merged_last_and_section_by_section() -> None:
    given = {"zero_optimization": {"overlap_comm": False}, "optimizer": {"params": {"eps": 1e-6}}, "steps_per_print": 7}
    settings = TrainSettings(zero_stage=2, deepspeed=given)
    before, after = config_of(TrainSettings(zero_stage=2)), config_of(settings)
    assert after["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert after["optimizer"]["params"] == before["optimizer"]["params"] | {"eps": 1e-6}
    assert after["steps_per_print"] == 7
    changed = {"zero_optimization", "optimizer", "steps_per_print"}
    assert {key for key in after if after[key] != before.get(key)} == changed


def test_it_reaches_the_engine(engine: Any, ids: Tensor) -> None:
    given = {"zero_optimization": {"reduce_bucket_size": 1234}, "optimizer": {"params": {"eps": 1e-3}}}
    changed, plain = engine(zero_stage=2, deepspeed=given), engine(zero_stage=2)
    assert changed._engine.zero_reduce_bucket_size() == 1234
    assert {group["eps"] for group in changed._engine.optimizer.param_groups} == {1e-3}
    assert losses(changed, ids) != losses(plain, ids)


@pytest.mark.parametrize("stage", [2, extended(3)])
def test_an_optimiser_in_cpu_memory_trains_alike(engine: Any, ids: Tensor, stage: int) -> None:
    """Where there is no GPU, torch's Adam serves; on one it gives way to DeepSpeed's, which is compiled."""
    given = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}}
    offloaded = engine(zero_stage=stage, deepspeed=given)
    assert offloaded._engine.zero_use_cpu_optimizer()
    assert losses(offloaded, ids) == pytest.approx(losses(engine(zero_stage=stage), ids), abs=1e-5)


def test_adam_gives_way_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that only says that it has a GPU: the configuration is made, nothing is started."""

    def is_torchs(**given: Any) -> bool:
        return config_of(TrainSettings(zero_stage=2, deepspeed=given))["optimizer"]["params"]["torch_adam"]

    offload = {"offload_optimizer": {"device": "cpu"}}
    assert is_torchs(zero_optimization=offload)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert is_torchs() and is_torchs(zero_optimization={"offload_optimizer": {"device": "none"}})
    assert not is_torchs(zero_optimization=offload)
    assert not is_torchs(optimizer={"params": {"torch_adam": False}})


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
        ({"communication_data_type": "fp9"}, "train.deepspeed: .*fp9|Invalid communication_data_type"),
    ],
)
def test_what_deepspeed_refuses_is_told_before_anything_starts(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_training(TrainSettings(num_workers=4, deepspeed=wrong))


def test_what_deepspeed_takes_passes() -> None:
    given: Any = {"zero_optimization": {"offload_param": {"device": "cpu"}, "overlap_comm": True}}
    check_training(TrainSettings(num_workers=4, zero_stage=3, dtype="bfloat16", deepspeed=given))


def test_settings_with_it_are_plain_values() -> None:
    made = [TrainSettings(deepspeed={"zero_optimization": {"sub_group_size": n}}) for n in (10, 10, 20)]
    assert len({*made}) == 2
    assert TrainSettings(**json.loads(json.dumps(made[0].model_dump()))) == made[0]


def test_a_training_checkpoint_knows_what_changes_its_files(engine: Any, tmp_path: Path) -> None:
    engine(deepspeed={"zero_optimization": {"reduce_bucket_size": 1000}}).save(tmp_path)
    engine().load(tmp_path)
    with pytest.raises(ValueError, match="'round_robin_gradients': True"):
        engine(deepspeed={"zero_optimization": {"round_robin_gradients": True}}).load(tmp_path)
