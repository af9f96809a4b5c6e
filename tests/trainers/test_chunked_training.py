"""Losses in chunks under DeepSpeed: training goes as with all logits, at every stage, with one worker and with two."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parameters import extended
from safetensors.torch import load_file, save_file
from torch import Tensor
from zero_three import split_small_weights

from attention.io import checkpoint
from attention.modeling import predictions
from trainers.engine import TrainEngine
from trainers.evaluation import evaluate
from trainers.loop import train_model
from trainers.losses import bild, kl, language_modelling, objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream

REPOSITORY = Path(__file__).resolve().parents[2]


CASES = [
    (0, "float32", {}),
    (3, "float32", {}),
    extended(3, "bfloat16", {}),
    (2, "float32", {"tuning": "lora", "lora_rank": 2}),
    extended(3, "float32", {"tuning": "lora", "lora_rank": 2}),
    extended(1, "bfloat16", {}),
]


@pytest.mark.extended
@pytest.mark.parametrize(("stage", "dtype", "more"), CASES)
@pytest.mark.parametrize("tied", [False, extended(True)])
def test_one_worker_trains_as_with_all_logits(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, stage: Any, dtype: Any, more: dict[str, Any], tied: bool
) -> None:
    split_small_weights(monkeypatch)
    start, teacher = tiny_model("llama", tie_word_embeddings=tied), tiny_model("llama", seed=1)
    kind = getattr(torch, dtype)
    ids = torch.randint(0, 64, (40, 12), generator=torch.Generator().manual_seed(0))
    settings = TrainSettings(learning_rate=3e-3, zero_stage=stage, dtype=dtype, micro_batch_size=4, **more)
    runs = []
    for positions in (1000, 7):
        monkeypatch.setattr(predictions, "CHUNK_BYTES", 4 * 64 * positions)
        engine, losses = TrainEngine(copy.deepcopy(start).to(kind), settings, 5), []
        loss_fn = objective("kl_bild", 0.3, copy.deepcopy(teacher).to(kind))
        train_model(engine, BatchStream(ids, 8), steps=5, loss_fn=loss_fn, on_step=lambda _, x, to=losses: to.append(x))
        runs.append((losses, engine.weights(), evaluate(engine.model, ids[:5], batch_size=2).loss))
        engine.close()
    (losses, weights, held_out), (again, others, after) = runs
    near = 2e-4 if dtype == "float32" else 0.05
    assert (again, after) == (pytest.approx(losses, abs=near), pytest.approx(held_out, abs=near))
    moved = [(tensor.float() - start.state_dict()[name]).abs().max() for name, tensor in weights.items()]
    assert max(moved) > 5e-3  # so that a step of the wrong size would show
    if dtype == "float32":  # the last bit of a gradient in bfloat16 may turn a step of Adam's around
        for name, tensor in weights.items():
            torch.testing.assert_close(others[name], tensor, atol=near, rtol=0)


@pytest.mark.extended
@pytest.mark.parametrize("stages", [(0, 3), (1, 2)], ids=str)
@pytest.mark.parametrize(("tied", "rows"), [(False, 8), (True, 8), (False, 7)])
def test_two_workers_find_the_gradient_of_all_logits(
    tiny_model: Any, tmp_path: Path, stages: tuple[int, ...], tied: bool, rows: int
) -> None:
    """Three times, since with ZeRO 3 the later passes are other code than the first, with evaluations in between. With
    ZeRO 3 the teacher is split too: workers must call its head equally often, whatever rows they have."""
    model, teacher = tiny_model("llama", tie_word_embeddings=tied), tiny_model("llama", seed=1)
    ids = torch.randint(0, 64, (rows, 12), generator=torch.Generator().manual_seed(0))
    for name, each in (("model", model), ("teacher", teacher)):
        checkpoint.save(each, tmp_path / name)
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    script = [sys.executable, Path(__file__).with_name("chunked_workers.py"), tmp_path, *map(str, stages)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    loss, slopes, held_out = expected(model, teacher, ids)
    for stage in stages:
        result = load_file(tmp_path / f"{stage}.safetensors")
        assert result.pop("loss").tolist() == pytest.approx([loss] * 3, abs=1e-5)
        assert result.pop("held_out").flatten().tolist() == pytest.approx(held_out * 3, abs=1e-5)
        assert set(result) == set(slopes)
        for name, slope in slopes.items():
            torch.testing.assert_close(result[name], slope, atol=1e-6, rtol=1e-4, msg=f"stage {stage}, {name}")


def expected(model: Any, teacher: Any, ids: Tensor) -> tuple[float, dict[str, Tensor], list[float]]:
    """Of all logits at once: the loss, its gradients, and the scores of the first five sequences."""

    def of(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, guide = (m(rows).logits[:, :-1].flatten(0, 1) for m in (model, teacher))
        guide = guide.detach()
        return language_modelling(logits, rows[:, 1:].flatten()), kl(logits, guide), bild(logits, guide)

    language, divergence, difference = of(ids)
    loss = 0.3 * (divergence + difference) + 0.7 * language
    loss.backward()
    slopes = {name: p.grad for name, p in model.named_parameters()}
    with torch.no_grad():
        language, divergence, _ = of(ids[:5])
    return loss.item(), slopes, [language.item(), divergence.item()]
