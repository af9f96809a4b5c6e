"""Evaluation against a slow reference, in one piece and in shares; the cache by what it holds."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.conversion.convert import convert
from attention.modeling.running import batch_of
from attention.plan import AttentionPlan, LayerPlan
from trainers.evaluation import CachedTeacher, decode_speed, evaluate, measure_cache


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 64, (7, 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def slow(model: Any, teacher: Any, ids: Tensor) -> tuple[float, float]:
    """Token by token, in float64."""
    losses, divergences = [], []
    for row in ids:
        ours = model(row[None]).logits[0].double().log_softmax(-1)
        other = teacher(row[None]).logits[0].double().log_softmax(-1)
        for t in range(len(row) - 1):
            losses.append(-ours[t, row[t + 1]].item())
            divergences.append((other[t].exp() * (other[t] - ours[t])).sum().item())
    return sum(losses) / len(losses), sum(divergences) / len(divergences)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_agrees_with_the_slow_reference_at_any_batch_size(tiny_model: Any, ids: Tensor, batch_size: int) -> None:
    model, teacher = tiny_model("llama"), tiny_model("llama", seed=1)
    got = evaluate(model, ids, teacher=teacher, batch_size=batch_size)
    loss, divergence = slow(model, teacher, ids)
    assert got.loss == pytest.approx(loss, abs=1e-5)
    assert got.kl == pytest.approx(divergence, abs=1e-5)
    assert got.tokens == 7 * 11
    assert got.seconds > 0


def test_a_remembering_teacher_sees_each_batch_once_as_far_as_there_is_room(tiny_model: Any, ids: Tensor) -> None:
    model, teacher = tiny_model("llama"), tiny_model("llama", seed=1)
    expected = evaluate(model, ids, teacher=teacher, batch_size=4)
    passes: list[int] = []
    teacher.register_forward_hook(lambda *_: passes.append(1))
    one_batch = 4 * 12 * 32 * 4
    for room, seen in ((2 * one_batch, 2), (one_batch, 3), (0, 4)):
        remembering = CachedTeacher(teacher, most=room)
        passes.clear()
        for _ in range(2):
            got = evaluate(model, ids, teacher=remembering, batch_size=4)
            assert (got.loss, got.kl) == (expected.loss, expected.kl)
        assert len(passes) == seen
    known = CachedTeacher(teacher)
    own = evaluate(known, ids, batch_size=4)
    passes.clear()
    assert evaluate(model, ids, teacher=known, batch_size=4).kl == expected.kl and not passes
    assert own.loss == pytest.approx(evaluate(teacher, ids, batch_size=4).loss, abs=1e-6)
    other = evaluate(model, ids.flip(1), teacher=CachedTeacher(teacher))
    assert other.kl == evaluate(model, ids.flip(1), teacher=teacher).kl != expected.kl


def test_a_model_is_at_no_distance_from_itself(tiny_model: Any, ids: Tensor) -> None:
    model = tiny_model("llama")
    assert evaluate(model, ids, teacher=model).kl == pytest.approx(0, abs=1e-7)
    assert evaluate(model, ids).kl is None


def test_an_increase_has_the_standard_error_of_the_paired_difference(tiny_model: Any, ids: Tensor) -> None:
    model, original = tiny_model("llama"), tiny_model("llama", seed=1)
    scored, worth = evaluate(model, ids, batch_size=3), evaluate(original, ids)
    each = [(slow(model, original, row[None])[0], slow(original, model, row[None])[0]) for row in ids]
    assert scored.sequence_losses is not None
    assert scored.sequence_losses.tolist() == pytest.approx([ours for ours, _ in each], abs=1e-5)
    result = scored.compared(worth)
    differences = [ours - other for ours, other in each]
    assert result["loss_increase"] == pytest.approx(statistics.mean(differences), abs=1e-5)
    assert result["loss_increase_stderr"] == pytest.approx(statistics.stdev(differences) / math.sqrt(7), abs=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(scored.loss))
    assert result["original_perplexity"] == pytest.approx(math.exp(worth.loss))
    assert worth.compared(worth)["loss_increase_stderr"] == 0
    one = evaluate(model, ids[:1])
    assert one.compared(evaluate(original, ids[:1]))["loss_increase_stderr"] is None  # of one sequence nobody knows


def test_long_sequences_are_run_few_at_a_time(tiny_model: Any) -> None:
    assert [batch_of(length) for length in (64, 512, 1024, 2048, 8192)] == [8, 4, 2, 1, 1]
    model, seen = tiny_model("llama", max_position_embeddings=2048), list[torch.Size]()
    model.get_decoder().register_forward_hook(
        lambda _, __, kwargs, output: seen.append(output[0].shape), with_kwargs=True
    )
    assert evaluate(model, torch.zeros(3, 2048, dtype=torch.int64)).tokens == 3 * 2047
    assert [shape[0] for shape in seen] == [1, 1, 1]


@pytest.mark.parametrize("world", [2, 3, 9])
def test_shares_of_workers_add_up_and_all_run_equally_many_passes(tiny_model: Any, ids: Tensor, world: int) -> None:
    model, teacher = tiny_model("llama"), tiny_model("llama", seed=1)
    passes, totals = [0] * world, torch.zeros(3, dtype=torch.float64)
    for rank in range(world):

        def count(*_: Any, rank: int = rank) -> None:
            passes[rank] += 1

        handle = model.register_forward_hook(count)

        def collect(total: Tensor) -> None:
            totals.add_(total)
            total.copy_(totals)

        share = evaluate(model, ids, teacher=teacher, batch_size=2, rank=rank, world_size=world, reduce=collect)
        handle.remove()
    whole = evaluate(model, ids, teacher=teacher)
    assert len(set(passes)) == 1
    assert share.tokens == whole.tokens
    assert share.loss == pytest.approx(whole.loss, abs=1e-6)
    assert share.kl == pytest.approx(whole.kl, abs=1e-6)


def test_training_mode_is_given_back(tiny_model: Any, ids: Tensor) -> None:
    model = tiny_model("llama").train()
    evaluate(model, ids)
    assert model.training
    assert not evaluate(model.eval(), ids).loss < 0
    assert not model.training


@pytest.mark.parametrize(
    ("key_map", "value_map"), [((0, 0, 1, 1), (0, 0, 1, 1)), ((0, 0, 0, 0), (0, 1, 2, 3)), ((0, 1, 0, 2), (0, 0, 1, 1))]
)
def test_cache_holds_what_the_plan_says(tiny_model: Any, key_map: Any, value_map: Any) -> None:
    plan = AttentionPlan((LayerPlan(key_map, value_map), LayerPlan.identity(4)), head_dim=8)
    model = convert(tiny_model("llama"), plan)
    assert measure_cache(model, 13) == 13 * plan.kv_bytes_per_token("float32")


def test_decode_speed_runs_and_refuses_a_batch(tiny_model: Any, ids: Tensor) -> None:
    speed = decode_speed(tiny_model("llama"), ids[:1], 4)
    assert speed.prefill > 0
    assert speed.decode > 0
    with pytest.raises(ValueError, match=r"prompt \[1, T\]"):
        decode_speed(tiny_model("llama"), ids, 4)


def test_sequences_without_a_prediction_are_refused(tiny_model: Any) -> None:
    with pytest.raises(ValueError, match=r"N >= 1 and T >= 2, got shape \(3, 1\)"):
        evaluate(tiny_model("llama"), torch.zeros(3, 1, dtype=torch.int64))


# ---- too little memory: an injected torch.OutOfMemoryError, there is no GPU here to fill ---------------------------


def limited(model: Any, rows: list[int]) -> list[int]:
    """From now on more than `rows[0]` sequences at once run out of memory. How many were tried, in order."""
    tried: list[int] = []

    def look(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tried.append(len(kwargs["input_ids"]))
        if tried[-1] > rows[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.register_forward_pre_hook(look, with_kwargs=True)
    return tried


@pytest.mark.heavy
@pytest.mark.parametrize("who", ["model", "teacher"])
def test_out_of_memory_is_met_with_half_the_sequences_down_to_one(tiny_model: Any, ids: Tensor, who: str) -> None:
    model, teacher = tiny_model("llama"), tiny_model("llama", seed=1)
    whole, rows = evaluate(model, ids, teacher=teacher), [2]
    assert whole.notes == ()
    tried = limited(model if who == "model" else teacher, rows)
    result = evaluate(model.train(), ids, teacher=CachedTeacher(teacher))
    assert result.notes == ("out of memory with 7 sequences at once: evaluated with 1",)
    assert tried == [7, 3, *[1] * 7]
    assert (result.loss, result.kl) == (pytest.approx(whole.loss, abs=1e-6), pytest.approx(whole.kl, abs=1e-6))
    assert result.tokens == whole.tokens and model.training
    rows[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(model, ids, teacher=teacher)


def test_a_worker_that_others_wait_for_does_not_start_again_alone(tiny_model: Any, ids: Tensor) -> None:
    model = tiny_model("llama")
    tried = limited(model, [2])
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(model, ids, reduce=lambda totals: None)
    assert tried == [7]


def test_another_error_is_none_of_memory(tiny_model: Any, ids: Tensor) -> None:
    model = tiny_model("llama")
    with pytest.raises((RuntimeError, IndexError), match="index"):
        evaluate(model, ids + 64)
