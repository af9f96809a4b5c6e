"""A training whose evaluation runs out of memory continues as one whose step does: with half the micro-batch.

Out of memory is an injected torch.OutOfMemoryError: there is no GPU here to fill.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parameters import extended
from test_carrying import Alone
from transformers import LlamaForCausalLM

from attention.plan import AttentionPlan, LayerPlan
from trainers.jobs.run import run_job
from trainers.settings import TrainSettings

PLAN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)),) * 2, head_dim=8)


@pytest.mark.parametrize("stage", [3, extended(1)])
def test_an_evaluation_out_of_memory(
    tiny_job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    train, held_out = (torch.randint(0, 64, (rows, 16), generator=generator) for rows in (40, 9))
    settings = TrainSettings(learning_rate=3e-3, zero_stage=stage, distillation="kl")
    job = tiny_job(tmp_path, PLAN, train, held_out, settings, milestones=(1, 2))
    forward, tried = LlamaForCausalLM.forward, []

    def limited(self: Any, input_ids: Any = None, **more: Any) -> Any:
        if not torch.is_grad_enabled() and type(self) is not LlamaForCausalLM:  # the converted model, evaluated
            tried.append(len(input_ids))
            if tried[-1] > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, input_ids, **more)

    monkeypatch.setattr(LlamaForCausalLM, "forward", limited)
    link = Alone()
    metrics = run_job(job, link)["metrics"]
    assert tried == [8, 4, 4, 1, 4, 4, 1]
    assert link.steps == [1, 2] and metrics["kl"] > 0
    assert metrics["notes"] == [
        "out of memory with micro_batch_size 8: trained with 4 and 2 accumulation steps instead of 1"
    ]
