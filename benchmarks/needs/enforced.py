"""A model through a whole search, each of its processes under a hard limit of what `headfold estimate` says times 1.15.

    python -m benchmarks memory-limits [--quick]

Calibration, planning with conversion and rung 0, a training step of two workers with ZeRO 3 and of one alone, and the
gate with the export are the product's own functions, without Ray around them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.models import llama
from benchmarks.needs.alone import Alone
from benchmarks.needs.limited import run_limited
from benchmarks.needs.memory import WIDE, random_checkpoint
from benchmarks.report import Row, Scale, benchmark
from orchestrator.config.schema import SearchConfig, parse_config
from orchestrator.promotion import gate
from orchestrator.promotion.state import BaselineModel, PromotionEntry, TrainedModel
from orchestrator.resources.processes import TRAINING_WORKER, Need, Needs
from orchestrator.search import prepare
from orchestrator.search.trials.context import training_job
from orchestrator.search.trials.untrained import untrained_facts
from orchestrator.search.validation import validate_search
from orchestrator.storage.paths import SearchFolder
from trainers.jobs.run import run_job
from trainers.jobs.train_job import TrainJob

SPARE = 1.15
GIGA = 2.0**30
SMALL = {"num_attention_heads": 16, "head_dim": 64, "intermediate_size": 2816, "vocab_size": 32_000}
"""Half as wide as WIDE: with 4 layers 0.12 billion parameters."""
# No more at once than there must be, and the optimiser in bfloat16: two workers of 1.1 billion parameters share 16 GB
LITTLE = {
    "bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    "zero_optimization": {
        "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 20_000_000, "sub_group_size": 50_000_000,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A process of the run: estimated bytes, and the most of one rank. `model`: bytes of a copy of the model in the
    dtype of the computation."""

    name: str
    need: Need
    peak: int
    model: int


def train(job: TrainJob) -> dict[str, Any]:
    return run_job(job, Alone(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))


train.trains = True  # type: ignore[attr-defined]


def config_of(model: Path, storage: Path, large: bool) -> SearchConfig:
    """A search of one candidate and its baseline, one step long. A large model has no refinement, which runs it up
    to each layer once more, and no teacher."""
    arm = {"recipe": "headfold_gqa", "changes": {"grouping": "neighbour"}, "params": {"refinement.fit_steps": 2}}
    if large:
        arm = {"recipe": "headfold_gqa", "changes": {"grouping": "neighbour", "refinement": "none"}}
    return parse_config({
        "name": "limits",
        "model": {"path": str(model), "dtype": "bfloat16"},
        "data": {
            "sequence_length": 128, "train": {"tokens": 4096}, "eval": {"tokens": 512}, "calibration": {"tokens": 1024},
        },
        "search": {"recipes": [arm], "kv_ratios": [0.25]},
        "rungs": {"steps": [0, 1]},
        "train": {
            "batch_size": 4, "micro_batch_size": 2, "num_workers": 2, "cpus_per_worker": 0.5, "zero_stage": 3,
            "distillation": "none" if large else "kl", "activation_checkpointing": True, "learning_rate": 1e-5,
            "dtype": "bfloat16", "deepspeed": LITTLE,
        },
        "storage": str(storage),
    })  # fmt: skip


def run(model: Path, place: Path, *, large: bool = False) -> Iterator[Step]:
    """The steps of a search of a checkpoint, each as it is done. Raises RuntimeError if one breaks its limit."""
    config = config_of(model, place / "runs", large)
    prepared, folder = validate_search(config), SearchFolder.fresh(place / "runs", "limits")
    needs = Needs(prepared.setup.inputs, "float32")
    width, stored = needs.working.itemsize, sum(file.stat().st_size for file in model.glob("*.safetensors"))
    by_name = {need.process: need for need in needs.all()}

    def limited(name: str, need: Need, *call: Any, ranks: int = 1, width: int = width) -> tuple[Any, Step]:
        limits: dict[str, Any] = {"limit": SPARE * need.total, "files": 2 * stored, "ranks": ranks}
        done = run_limited(place / name.replace(" ", "-"), *call, **limits)
        assert not (notes := _notes(done[0].answer)), notes
        return done[0].answer, Step(name, need, max(each.peak for each in done), width * needs.size.total)

    files, cache = prepared.files, prepared.cache / "calibration"
    arguments = (str(model), "bfloat16", "cpu", prepared.geometry, files, cache, config.train.device_batch_size)
    original, step = limited("original model", by_name["original model"], prepare.measure_original, *arguments)
    yield step
    context = prepare.trial_context(config, prepared, folder, original)
    candidate = next(c for c in prepared.problem.named if c.recipe.name == "headfold_gqa")
    trial = folder.trial("trial")
    trial.mkdir(parents=True)
    _, step = limited("planning", by_name["planning"], untrained_facts, candidate, context, trial)
    yield step
    split = training_job(context, trial, candidate, "split")
    settings = split.settings.model_copy(update={"num_workers": 1, "batch_size": split.settings.batch_size // 2})
    alone = replace(split, settings=settings, run_name="alone", out_dir=str(place / "alone-trained"))
    need = needs.memory_of_workers(TRAINING_WORKER).need(TRAINING_WORKER, settings)
    _, step = limited("one worker", need, train, alone, width=2)
    yield step
    report, step = limited("training worker", by_name[TRAINING_WORKER], train, split, ranks=2, width=2)
    yield step
    loss = report["metrics"]["loss"]
    entry = PromotionEntry("trial", candidate.recipe.name, 0.25, 1)
    entry.trained = TrainedModel(split.out_dir, loss)
    entry.baseline = BaselineModel(None, loss + 1, None)
    seen, step = limited("gate", by_name["gate"], gate.examine, entry, config, folder, context)
    assert set(seen.record.outcomes.values()) == {gate.OK}, seen.reasons
    yield step


def _notes(answer: Any) -> Any:
    """Return the notes of a record on memory that was missing and avoided."""
    record = answer.get("metrics", answer) if isinstance(answer, dict) else {}
    return record.get("notes")


@benchmark("memory-limits", devices=("cpu",))
def memory_limits(scale: Scale) -> Iterator[Row]:
    """Peak anonymous memory of each process of a search under a limit of 1.15 times its estimate."""
    config = llama(scale.pick(4, 19), scale.pick(SMALL, WIDE), tie_word_embeddings=False)
    with tempfile.TemporaryDirectory() as place:
        numbers = random_checkpoint(config, Path(place) / "model")
        about = f"{numbers / 1e9:.2f}B parameters, bfloat16"
        for step in run(Path(place) / "model", Path(place), large=not scale.quick):
            parts = ", ".join(f"{name} {number / GIGA:.2f}" for name, number in step.need.parts.items())
            copies = f"a copy of the model {step.model / GIGA:.2f}"
            yield Row(step.name, step.peak / GIGA, step.need.total / GIGA, "GiB", f"{about}; {copies}; {parts}")
