"""ZeRO 3 on two workers: built, trained, distilled from and written without anyone holding a whole model."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from parameters import extended
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from attention.conversion.convert import convert
from attention.io import checkpoint, piecewise
from attention.plan import AttentionPlan, HeadShare, LayerPlan
from trainers.engine import TrainEngine
from trainers.losses import objective
from trainers.settings import TrainSettings
from trainers.text.data import BatchStream
from trainers.zero import SplitModel, load_trainable

STEPS = 3
UNEVEN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
SHARED = AttentionPlan((LayerPlan.identity(4),) * 2, 8, (HeadShare(1, 1, 0, 3), HeadShare(1, 2, 0, 0)))
# Nothing whole that is not in use: small weights are split too, and let go of at once
AT_ONCE: dict[str, Any] = {
    "zero_optimization": {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "reduce_bucket_size": 100_000,
        "sub_group_size": 1_000_000,
    }
}


def settings_of(**settings: Any) -> TrainSettings:
    return TrainSettings(**{"learning_rate": 3e-3, "num_workers": 2, "zero_stage": 3, "deepspeed": AT_ONCE, **settings})


def steps(rank: int, ids: Tensor, folder: Path, teacher: Path, split: bool, settings: TrainSettings) -> Any:
    """Losses of some steps and the weights after them, on rank 0; the model and its teacher given whole, or split."""
    with ExitStack() as stack:
        model: Any = load_trainable(folder, settings) if split else checkpoint.load(folder, settings.dtype)
        engine = stack.enter_context(closing(TrainEngine(model, settings, STEPS)))
        guide: Any = None
        if settings.distillation != "none" and split:
            guide = stack.enter_context(closing(SplitModel(teacher, settings))).model
            assert all(p.numel() == 0 for p in guide.parameters())
        elif settings.distillation != "none":
            guide = checkpoint.load(teacher, settings.dtype).requires_grad_(False)
        assert all(p.numel() == 0 for p in engine.model.parameters())
        stream = BatchStream(ids, 8, rank=rank, world_size=2)
        loss_fn = objective(settings.distillation, 0.5, guide)
        losses = [engine.step(stream.next(), loss_fn) for _ in range(STEPS)]
        return losses, {name: tensor.numpy() for name, tensor in engine.weights().items()}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("family", "plan", "settings"),
    [
        ("llama", UNEVEN, {"distillation": "kl"}),
        extended("llama", UNEVEN, {"tuning": "lora", "lora_rank": 4}),
        extended("llama", UNEVEN, {"activation_checkpointing": True, "distillation": "kl"}),
        extended("llama", SHARED, {}),
        extended("gpt2", UNEVEN, {"tuning": "lora", "lora_rank": 4}),
        extended("gpt_neox", UNEVEN, {}),
        extended("opt", UNEVEN, {}),
    ],
)
def test_trains_as_from_whole_models(
    on_both: Any, tiny_model: Any, tmp_path: Path, family: str, plan: AttentionPlan, settings: dict[str, Any]
) -> None:
    original = tiny_model(family) if family == "gpt2" else tiny_model(family, tie_word_embeddings=True)
    checkpoint.save(original, tmp_path / "original")
    checkpoint.save(convert(original, plan), tmp_path / "model")
    ids = torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(0))
    places = (ids, tmp_path / "model", tmp_path / "original")
    whole, split = (
        on_both(tmp_path / name, steps, *places, name == "split", settings_of(**settings))
        for name in ("whole", "split")
    )
    (expected, weights), (losses, others) = whole[0], split[0]
    assert losses == split[1][0] == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected[-1]) > 0.01
    assert others.keys() == weights.keys() and not split[1][1]
    for name, values in weights.items():
        assert abs(others[name] - values).max() < 1e-4, name


def interrupted(rank: int, ids: Tensor, folder: Path, place: Path) -> tuple[list[float], list[float]]:
    """Losses of steps after a training checkpoint was written, and of the same steps when it was read again."""
    settings, result = settings_of(dtype="bfloat16"), []
    stream = BatchStream(ids, 8, rank=rank, world_size=2)
    with closing(TrainEngine(load_trainable(folder, settings), settings, STEPS)) as engine:
        engine.step(stream.next(), objective())
        engine.save(place, {"stream": stream.state_dict()})
        result.append([engine.step(stream.next(), objective()) for _ in range(2)])
    with closing(TrainEngine(load_trainable(folder, settings), settings, STEPS)) as engine:
        stream.load_state_dict(engine.load(place)["stream"])
        result.append([engine.step(stream.next(), objective()) for _ in range(2)])
    return result[0], result[1]


@pytest.mark.extended
def test_resuming_is_exact(on_both: Any, tiny_model: Any, tmp_path: Path) -> None:
    checkpoint.save(convert(tiny_model("llama"), UNEVEN), tmp_path / "model")
    ids = torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(0))
    for whole, resumed in on_both(tmp_path / "run", interrupted, ids, tmp_path / "model", tmp_path / "states"):
        assert whole == resumed and whole[0] != whole[1]


# ---- memory --------------------------------------------------------------------------------------------------------


def peak_of(work: Callable[[], Any]) -> tuple[int, Any]:
    """By how many bytes resident memory grew at most while `work` ran, and what it returned."""

    def status(name: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    result = work()
    return status("VmHWM") - before, result


def peaks(rank: int, ids: Tensor, small: Path, folder: Path, out: Path) -> dict[str, int]:
    """Peaks of one worker: building a model, a teacher, a forward pass of both, and writing it."""
    settings = settings_of(distillation="kl")
    load_trainable(small, settings)  # what libraries take at first use is not the model's
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: freed memory is returned at once, so that resident is what is in use
    libc.malloc_trim(0)
    result: dict[str, int] = {}
    result["model"], model = peak_of(lambda: load_trainable(folder, settings))
    result["teacher"], teacher = peak_of(lambda: SplitModel(folder, settings))
    with closing(teacher), closing(TrainEngine(model, settings, 1)) as engine, torch.no_grad():
        result["forward"], _ = peak_of(lambda: (engine.model(ids), teacher.model(ids)))

        def write() -> None:
            if rank == 0:
                piecewise.save_as(folder, engine.tensors(), out, shard=2**20)
            else:
                assert not list(engine.tensors())

        result["writing"], _ = peak_of(write)
    return result


@pytest.mark.extended
def test_no_worker_ever_holds_a_whole_model(on_both: Any, tiny_model: Any, tmp_path: Path) -> None:
    """A worker's half, of the model and of its teacher, and a few other tensors, the largest of them 7% of it."""
    shape: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 5, "vocab_size": 4000}
    config = LlamaConfig(**shape, num_attention_heads=12, tie_word_embeddings=False)
    checkpoint.save(AutoModelForCausalLM.from_config(config, dtype=torch.float32), tmp_path / "model")
    checkpoint.save(tiny_model("llama"), tmp_path / "small")
    size = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert size > 150e6
    ids = torch.randint(0, 4000, (1, 8))
    result = on_both(tmp_path / "split", peaks, ids, *(tmp_path / name for name in ("small", "model", "out")))
    for of_worker in result:
        for what, grown in of_worker.items():
            assert grown < (0.7 if what in ("model", "teacher") else 0.4) * size, (what, grown / size, result)
    first, second = (checkpoint.load(tmp_path / name).state_dict() for name in ("model", "out"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 5
