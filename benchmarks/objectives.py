"""Held-out loss after a few steps of training a conversion, by objective, learning rate and weights that are trained.

    python -m benchmarks objectives [--quick]

The demo checkpoint by `headfold_gqa` at half and a quarter of its cache, on 8,192 calibration tokens; 36 steps of 4
sequences of 256 fresh tokens, then the text that was calibrated on. A row is the loss increase over the original after
and before the training.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from attention.io import checkpoint
from benchmarks.report import Row, Scale, benchmark
from orchestrator import checkpoints
from orchestrator.config.options import ConvertOptions
from orchestrator.storage.shipped import shipped
from orchestrator.tasks.convert import Convert
from trainers.engine import TrainEngine
from trainers.evaluation import CachedTeacher, evaluate
from trainers.loop import train_model
from trainers.losses import objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream, TextCut, Texts

LENGTH, BATCH, TOKENS = 256, 4, 8192
OBJECTIVES, RATES, WEIGHTS = ("none", "kl"), (3e-5, 1e-4, 3e-4), ("full", "kv")


@benchmark("objectives", devices=())  # by its name alone: it trains
def objectives(scale: Scale) -> Iterator[Row]:
    """Loss increase of a conversion after 36 steps, by objective, rate and weights, against that before them."""
    demo = shipped("examples/stdlib-llama/config.json").parent
    tokenizer = checkpoints.load_tokenizer(demo)
    steps = scale.pick(1, 36)
    cut = TextCut("stdlib", "train", steps * BATCH * LENGTH, LENGTH)
    sizes: dict[str, Any] = {
        "calibration_tokens": TOKENS,
        "eval_tokens": scale.pick(2 * LENGTH, TOKENS),
        "sequence_length": LENGTH,
    }
    texts = Texts("stdlib").load(tokenizer, LENGTH, **sizes)
    fresh = torch.from_numpy(cut.in_memory(tokenizer)).long()
    original: Any = checkpoint.load(demo, torch.float32).requires_grad_(False)
    teacher = CachedTeacher(original)
    before = evaluate(teacher, texts.held_out)
    fit = scale.pick({"refinement.fit_steps": 2}, {})
    same: dict[str, Any] = {"model": demo, "recipe": "headfold_gqa", "overrides": fit, "calibration_data": "stdlib"}
    same |= {**sizes, "device": "cpu"}
    with tempfile.TemporaryDirectory() as place:
        for ratio in scale.pick((0.25,), (0.5, 0.25)):
            folder = Path(place) / f"{ratio:g}"
            Convert(ConvertOptions(kv_ratio=ratio, out=folder, **same)).run()
            grid: list[Any] = list(itertools.product([("fresh", fresh)], OBJECTIVES, RATES, WEIGHTS))
            grid += [(("calibration", texts.calibration), "kl", *best) for best in ((1e-4, "full"), (3e-4, "kv"))]
            start = evaluate(checkpoint.load(folder, torch.float32), texts.held_out, teacher=teacher)
            for (text, sequences), name, rate, weights in scale.pick(grid[:1], grid):
                model: Any = checkpoint.load(folder, torch.float32)
                settings = TrainSettings(learning_rate=rate, batch_size=BATCH, tuning=weights, zero_stage=0)
                engine = TrainEngine(model.requires_grad_(True), settings, steps)
                loss = objective(name, 1.0, original)
                train_model(engine, BatchStream(sequences, BATCH), steps=steps, loss_fn=loss)
                after = evaluate(engine.model, texts.held_out, teacher=teacher)
                engine.close()
                yield Row(
                    f"{ratio:.0%}, {'KL' if name == 'kl' else 'text'}, {rate:g}, {weights}, {text}",
                    after.loss - before.loss,
                    start.loss - before.loss,
                    "nats",
                    f"KL {start.kl:.4f} before, {after.kl:.4f} after",
                )
