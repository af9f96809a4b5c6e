"""Layer activations of an original model on text: the same whether cached or recomputed, in any order of layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.conversion.refinement.capture import Record, recorded
from attention.conversion.refinement.original import STORED_BYTES, Original, bytes_to_keep
from attention.families import families, family_of
from attention.modeling.running import Streams, entering

Tiny = Callable[..., PreTrainedModel]
IDS = torch.randint(0, 64, (5, 12), generator=torch.Generator().manual_seed(3))


def afresh(model: PreTrainedModel, layer: int) -> list[Record]:
    """Run from the embeddings to that layer, independent of earlier runs."""
    return list(recorded(Streams(model, family_of(model.config).attention_modules(model), IDS, 2), layer))


def tensors(records: list[Record]) -> list[Tensor]:
    return [t for r in records for t in (entering(r.args, r.kwargs), r.output, r.stream)]


@pytest.mark.parametrize("most", [0, STORED_BYTES], ids=["run again", "kept"])
@pytest.mark.parametrize("family", sorted(families()))
def test_records_are_those_of_a_run_of_their_own(family: str, most: int, tiny_model: Tiny) -> None:
    model = tiny_model(family, num_hidden_layers=4).requires_grad_(False)
    text = Original(model, most).on(IDS, batch_size=2)
    for layer in (0, 1, 3, 2, 2, 3):
        result = tensors(list(text.at(layer)))
        for tensor, expected in zip(result, tensors(afresh(model, layer)), strict=True):
            torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=1e-4)
    assert not any("forward" in module.__dict__ for module in model.modules()), "all as it was"


def test_a_kept_text_runs_once_and_is_the_same_for_all_callers(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama").requires_grad_(False)
    original = Original(model)
    assert original.on(IDS) is original.on(IDS.clone()) and Original.of(original) is original
    assert original.on(IDS) is not original.on(IDS.flip(0)) and original.on(IDS) is not original.on(IDS, batch_size=2)
    first = [list(original.on(IDS).at(layer)) for layer in range(2)]

    def again(*_: object, **__: object) -> None:
        raise AssertionError("run again")

    monkeypatch.setattr(model.get_decoder(), "forward", again)
    for layer in (1, 0):
        assert all(one is other for one, other in zip(original.on(IDS).at(layer), first[layer], strict=True))


def test_all_is_kept_or_nothing_and_no_more_than_there_is_room_for(tiny_model: Tiny) -> None:
    """Width 32, float32: three tensors of it per token in each of two layers, and the rotary table of a batch."""
    model = tiny_model("llama").requires_grad_(False)
    needed = bytes_to_keep(2, IDS.numel(), 32, 4)
    assert needed == 2 * 3 * 4 * 32 * IDS.numel()
    for room, kept in ((needed * 8 // 10, False), (needed * 12 // 10, True)):
        original = Original(model, room)
        text = original.on(IDS)
        assert (text.at(0) is text.at(0)) == kept
        assert 0 <= original.room <= room - needed * kept
        list(original.on(IDS.flip(0)).at(1))  # no room remains
        assert original.on(IDS.flip(0)).at(1) is not original.on(IDS.flip(0)).at(1)
    assert bytes_to_keep(32, 16_384, 4096, 4) == 0
    assert bytes_to_keep(4, 44_000, 256, 4) == STORED_BYTES, "the part that is fitted on, seven eighths, has room"


@pytest.mark.parametrize("family", sorted(families()))
def test_attention_whose_output_is_known_need_not_run(family: str, tiny_model: Tiny) -> None:
    model = tiny_model(family, num_hidden_layers=3).requires_grad_(False)
    modules = family_of(model.config).attention_modules(model)
    known, other, run = (Streams(model, modules, IDS, 2) for _ in range(3))
    for layer in range(2):
        outputs = [record.output for record in recorded(known, layer)]
        known.advance(layer + 1, outputs)
        run.advance(layer + 1)
        for result, expected in zip(recorded(known, layer + 1), recorded(run, layer + 1), strict=True):
            torch.testing.assert_close(result.stream, expected.stream, atol=1e-5, rtol=1e-4)
    outputs = [record.output for record in recorded(other, 0)]
    other.advance(1, [output.roll(1, -1) for output in outputs])
    changed = [record.stream for record in recorded(other, 1)]
    assert not any(torch.allclose(a, b.stream, atol=1e-3) for a, b in zip(changed, afresh(model, 1), strict=True))
