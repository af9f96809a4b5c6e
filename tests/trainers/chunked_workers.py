"""Run as a script: one training step and one evaluation with losses in chunks, by workers in separate processes.

`python chunked_workers.py FOLDER STAGE...` trains `FOLDER/model` with the teacher `FOLDER/teacher` on `FOLDER/ids`, a
tensor in a safetensors file. Rank 0 writes `FOLDER/STAGE.safetensors`: the gradient of every weight by its name, from
Adam's first moment after the step; the step's `loss`; `held_out`, loss and KL after a step that changes nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state
from safetensors.torch import load_file, save_file

import trainers.engine
from attention.io import checkpoint
from attention.modeling import predictions
from trainers.evaluation import evaluate
from trainers.losses import objective
from trainers.settings import TrainSettings

WORKERS, POSITIONS, RATE = 2, 11, 1e-30  # a rate that leaves the weights as they are, so that steps can be repeated
SPLIT = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
BETA = 0.9


def work(folder: Path, stage: int, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORKERS))
    meeting = folder / f"meeting-{stage}"
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORKERS, timeout=timedelta(seconds=60)
    )
    still: dict[str, Any] = {"learning_rate": RATE, "weight_decay": 0, "warmup_fraction": 0, "max_grad_norm": 1e9}
    ids = load_file(folder / "ids.safetensors")["ids"]
    shape: dict[str, Any] = {"num_workers": [1, WORKERS], "zero_stage": stage, "micro_batch_size": 2}
    settings = TrainSettings(**still, **shape, batch_size=len(ids), beta1=BETA).on(WORKERS)
    split_small_weights()
    model, teacher = (checkpoint.load(folder / name) for name in ("model", "teacher"))
    predictions.CHUNK_BYTES = 4 * model.config.vocab_size * POSITIONS
    if stage == 3:
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": SPLIT}
        teacher = deepspeed.initialize(model=teacher.requires_grad_(False), config=config)[0].module
    engine = trainers.engine.TrainEngine(model, settings, 10)
    loss_fn = objective("kl_bild", 0.3, teacher)
    losses, held_out = [], []
    for _ in range(3):  # DeepSpeed looks on in the first passes, and fetches ahead in later ones
        losses.append(engine.step(ids[rank::WORKERS], loss_fn))
        together: dict[str, Any] = {"rank": rank, "world_size": WORKERS, "reduce": dist.all_reduce}
        # Of five rows one worker has three and the other two, and a batch of which no row counts
        scored = evaluate(engine.model, ids[:5], teacher=teacher, batch_size=1, **together)
        held_out.append([scored.loss, scored.kl])
    moments = {name: moment(engine, p) for name, p in engine.model.named_parameters()}
    grown = 1 - BETA**3  # the first moment of three equal gradients
    if rank == 0:
        result = {name: (m / grown).contiguous() for name, m in moments.items()}
        more = {"loss": torch.tensor(losses), "held_out": torch.tensor(held_out)}
        save_file(result | more, folder / f"{stage}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def moment(engine: Any, parameter: Any) -> torch.Tensor:
    if engine.settings.zero_stage == 0:
        return engine._engine.optimizer.state[parameter]["exp_avg"]
    result = safe_get_full_optimizer_state(parameter, "exp_avg")
    assert result is not None
    return result.clone().view(getattr(parameter, "ds_shape", parameter.shape))


def split_small_weights() -> None:
    """With ZeRO 3 even the smallest parameter is split, and none stays whole between its uses."""
    initialize = deepspeed.initialize

    def split(*args: Any, config: dict[str, Any], **more: Any) -> Any:
        if config["zero_optimization"]["stage"] == 3:
            config["zero_optimization"] |= SPLIT
        return initialize(*args, config=config, **more)

    deepspeed.initialize = split


if __name__ == "__main__":
    place, fork = Path(sys.argv[1]), multiprocessing.get_context("fork")
    for one in map(int, sys.argv[2:]):
        workers = [fork.Process(target=work, args=(place, one, rank)) for rank in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
            if worker.exitcode != 0:
                for other in workers:
                    other.kill()
                sys.exit(f"a worker of stage {one} ended with {worker.exitcode}")
