"""Losses made of a part of the positions at a time, against those of the logits of the whole batch."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parameters import extended
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention.families import families
from attention.modeling import predictions
from attention.modeling.losses import language_loss, language_modelling
from attention.modeling.predictions import mean_cost
from trainers.evaluation import evaluate
from trainers.losses import bild, kl, objective

VOCABULARY = 64
DISTILLATIONS = ("none", "kl", "kl_bild")


@contextmanager
def at_once(positions: int, vocabulary: int = VOCABULARY) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictions, "CHUNK_BYTES", 4 * vocabulary * positions)
        yield


def tokens(rows: int, length: int, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def whole(distillation: str, weight: float, model: Any, teacher: Any, ids: Tensor) -> Tensor:
    """The loss as it is defined, of all logits at once."""
    logits, labels = model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    language = -logits.float().log_softmax(-1)[torch.arange(len(labels)), labels].mean()
    if distillation == "none":
        return language
    guide = teacher(ids).logits[:, :-1].flatten(0, 1).detach()
    distance = kl(logits, guide) + (bild(logits, guide) if distillation == "kl_bild" else 0)
    return weight * distance + (1 - weight) * language


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model: Any, teacher: Any, ids: Tensor, distillation: str, positions: int, tolerance: float) -> None:
    expected = whole(distillation, 0.3, model, teacher, ids)
    slopes = gradients(model, expected)
    with at_once(positions):
        result = objective(distillation, 0.3, teacher)(model, ids)
        # Numbers of float32 near 19, as kl_bild has them, are 2e-6 apart
        assert result.item() == pytest.approx(expected.item(), abs=tolerance * (1 + abs(expected.item())))
        again = gradients(model, result)
    assert set(again) == set(slopes) == {name for name, _ in model.named_parameters()}
    for name, slope in slopes.items():
        assert (again[name] - slope).abs().max() <= tolerance * (1 + slope.abs().max()), name
    assert all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize("distillation", DISTILLATIONS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_loss_and_gradients_are_those_of_all_logits(
    tiny_model: Any, distillation: str, tied: bool, dtype: torch.dtype, tolerance: float
) -> None:
    model = tiny_model("llama", dtype=dtype, tie_word_embeddings=tied)
    teacher = tiny_model("llama", seed=1, dtype=dtype)
    compare(model, teacher, tokens(3, 9), distillation, 7, tolerance)


@pytest.mark.parametrize("family", sorted(families()))
def test_every_family(tiny_model: Any, family: str) -> None:
    compare(tiny_model(family), tiny_model(family, seed=1), tokens(2, 9), "kl", 5, 2e-6)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 3),
    length=st.integers(2, 9),
    positions=st.integers(1, 30),
    distillation=st.sampled_from(DISTILLATIONS),
    seed=st.integers(0, 9),
)
def test_any_batch_in_chunks_of_any_size(
    pair: tuple[Any, Any], rows: int, length: int, positions: int, distillation: str, seed: int
) -> None:
    compare(*pair, tokens(rows, length, seed), distillation, positions, 2e-6)


@pytest.fixture(scope="module")
def pair(tiny_model: Any) -> tuple[Any, Any]:
    return tiny_model("qwen2"), tiny_model("llama", seed=1)


@torch.no_grad()
@pytest.mark.parametrize("positions", [1, 5, 1000])
def test_means_against_sums_token_by_token(pair: tuple[Any, Any], positions: int) -> None:
    """In float64 and plain Python, for training's loss, for evaluation, and for planning's loss."""
    (model, teacher), ids = pair, tokens(5, 7)
    language = divergence = 0.0
    for row in ids:
        ours, other = (m(row[None]).logits[0].double().log_softmax(-1).tolist() for m in (model, teacher))
        for t in range(6):
            language -= ours[t][row[t + 1]]
            divergence += sum(math.exp(q) * (q - p) for p, q in zip(ours[t], other[t], strict=True))
    language, divergence = language / 30, divergence / 30
    with at_once(positions):
        assert objective("kl", 0.25, teacher)(model, ids).item() == pytest.approx(
            0.25 * divergence + 0.75 * language, abs=1e-5
        )
        scored = evaluate(model, ids, teacher=teacher, batch_size=2)
        assert (scored.loss, scored.kl) == (pytest.approx(language, abs=1e-5), pytest.approx(divergence, abs=1e-5))
        assert language_loss(model, ids, batch_size=2) == pytest.approx(language, abs=1e-5)


def test_a_model_may_be_compared_with_itself_and_is_left_as_it_was(pair: tuple[Any, Any]) -> None:
    model, ids = pair[0], tokens(2, 8)
    before = model(ids).logits
    with at_once(3):
        assert evaluate(model, ids, teacher=model).kl == pytest.approx(0, abs=1e-7)
        with pytest.raises(ZeroDivisionError):
            mean_cost(model, ids, lambda *_: torch.tensor(1 / 0))
    assert torch.equal(model(ids).logits, before)
    assert "forward" not in vars(model.get_output_embeddings())


def test_a_head_that_is_not_trained_hands_gradients_on(tiny_model: Any) -> None:
    """As with adapters, whose model is frozen."""
    model, ids = tiny_model("llama"), tokens(2, 9)
    frozen = copy.deepcopy(model)
    frozen.get_output_embeddings().requires_grad_(False)
    slopes = gradients(model, whole("none", 0, model, None, ids))
    with at_once(5):
        result = gradients(frozen, objective()(frozen, ids))
    assert set(slopes) - set(result) == {"lm_head.weight"}
    for name, slope in result.items():
        torch.testing.assert_close(slope, slopes[name], atol=2e-6, rtol=1e-5)


# ---- memory ------------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """The most elements of a tensor that any operation returns, and the most bytes at once in tensors of logits, whose
    last dim is the vocabulary, of `positions`; each storage counts once."""

    def __init__(self, positions: int, vocabulary: int) -> None:
        super().__init__()
        self.positions, self.vocabulary = positions, vocabulary
        self.most, self.now, self.peak = 0, 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.most = max(self.most, tensor.numel())
                if tensor.shape == (self.positions, self.vocabulary):
                    self.count(tensor.untyped_storage())
        return result

    def count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


LARGE, ROWS, LENGTH = 50_000, 4, 17


@pytest.mark.parametrize("dtype", [torch.float32, extended(torch.bfloat16)])
@pytest.mark.parametrize("what", [*DISTILLATIONS, "evaluation", "planning"])
def test_no_tensor_holds_the_logits_of_a_batch(tiny_model: Any, what: str, dtype: torch.dtype) -> None:
    model, teacher = (tiny_model("llama", seed=seed, vocab_size=LARGE, dtype=dtype) for seed in (0, 1))
    ids = tokens(ROWS, LENGTH, vocabulary=LARGE)
    weights = model.get_output_embeddings().weight.numel()
    with at_once(6, LARGE), Watch(6, LARGE) as watch:
        if what == "evaluation":
            evaluate(model, ids, teacher=teacher)
        elif what == "planning":
            language_loss(model, ids)
        else:
            objective(what, 0.5, teacher)(model, ids).backward()
        bound = predictions.most_logit_bytes(LARGE, ROWS * LENGTH)
    assert watch.most <= weights < ROWS * (LENGTH - 1) * LARGE
    assert 0 < watch.peak <= bound


def test_the_watch_sees_the_logits_of_a_batch(tiny_model: Any) -> None:
    model, ids = tiny_model("llama", vocab_size=LARGE), tokens(ROWS, LENGTH, vocabulary=LARGE)
    with Watch(1, LARGE) as watch:
        language_modelling(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert watch.most == ROWS * LENGTH * LARGE


@pytest.mark.parametrize("vocabulary", [32_000, 128_256, 262_144])
@pytest.mark.parametrize("gigabytes", [0, 24, 40, 80, 141])
def test_a_gpu_makes_as_many_logits_at_once_as_its_memory_allows(gigabytes: int, vocabulary: int) -> None:
    memory = gigabytes * 10**9
    positions = predictions.positions_at_once(vocabulary, memory)
    whole = predictions.most_logit_bytes(vocabulary, 10**9, memory)
    if not memory:  # of the host: blocks of up to 32 MiB are reused, larger ones mapped anew
        assert positions == 24 * 2**20 // (4 * vocabulary) == predictions.positions_at_once(vocabulary)
        return
    assert whole <= memory / 8
    assert positions >= 1024 or whole > 0.99 * memory / 8
    assert gigabytes < 80 or positions >= 1024
    assert predictions.most_logit_bytes(vocabulary, 7, memory) == 8 * 4 * vocabulary * 7


def test_workers_agree_on_the_memory_that_logits_are_made_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that there is only by name."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))
    monkeypatch.setattr(predictions, "_agreed", {})
    assert (predictions.chunk_memory(torch.device("cpu")), predictions.chunk_memory(device)) == (0, 80 * 10**9)
    predictions.agree_on_chunk_memory(device, 40 * 10**9)
    assert predictions.chunk_memory(device) == 40 * 10**9
