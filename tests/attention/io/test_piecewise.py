"""A checkpoint read and written one tensor at a time is the one that is read and written whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_cache import put_in_hub_cache
from safetensors.torch import load_file
from torch import Tensor

from attention.conversion.convert import convert
from attention.families import families
from attention.io import checkpoint, piecewise
from attention.io.sources import CheckpointError
from attention.plan import AttentionPlan, Composition, HeadShare, LayerPlan

UNEVEN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
PAIRS = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 0, 1, 1)),) * 2, head_dim=8)
SHARED = AttentionPlan((LayerPlan.identity(4),) * 2, 8, (HeadShare(1, 1, 0, 3), HeadShare(1, 2, 0, 0)))
COMPOSED = AttentionPlan((LayerPlan.identity(4),) * 2, 8, composition=Composition())
MIXTURES = ("glm4_moe", "minimax_m2", "mixtral", "olmoe", "qwen3_moe")  # whose files have a matrix for each expert
KINDS = [(family, UNEVEN) for family in families()] + [("llama", plan) for plan in (PAIRS, SHARED, COMPOSED)]
KINDS += [(family, PAIRS) for family in MIXTURES]


def filled(source: str | Path, dtype: torch.dtype) -> Any:
    """The model of an outline, with its weights read."""
    model, weights = piecewise.outline(source, dtype)
    assert all(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, last = name.rpartition(".")
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        weights.read_into({name: whole})
        setattr(model.get_submodule(owner), last, torch.nn.Parameter(whole))
    return model


def names(folder: Path) -> set[str]:
    """The tensors of the files of a folder."""
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.parametrize(("family", "plan"), KINDS)
def test_both_ways_are_those_of_a_whole_model(
    tiny_model: Any, tmp_path: Path, family: str, plan: AttentionPlan
) -> None:
    original = tiny_model(family)
    checkpoint.save(original, tmp_path / "original")
    source = checkpoint.save(convert(original, plan), tmp_path / "model", record={"note": 1})
    whole, model = checkpoint.load(source, torch.float32), filled(source, torch.float32)
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(model(ids).logits, whole(ids).logits)
    other = {name: tensor + 1 if tensor.is_floating_point() else tensor for name, tensor in whole.state_dict().items()}
    piecewise.save_as(source, other.items(), tmp_path / "out", {"note": 1}, shard=4000)
    whole.load_state_dict(other)
    expected = checkpoint.save(whole, tmp_path / "expected", record={"note": 1})
    written = {name: json.loads((tmp_path / "out" / name).read_text()) for name in ("config.json", "headfold.json")}
    assert written == {name: json.loads((expected / name).read_text()) for name in written}
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 3
    assert names(tmp_path / "out") == names(expected), "what engines and older transformers read"
    back = checkpoint.load(tmp_path / "out")
    assert all(torch.equal(tensor, other[name]) for name, tensor in back.state_dict().items())
    assert checkpoint.intact(tmp_path / "out")


def test_tied_matrices_are_one_and_written_once(tiny_model: Any, tmp_path: Path) -> None:
    source = checkpoint.save(tiny_model("llama", tie_word_embeddings=True), tmp_path / "model")
    model, _ = piecewise.outline(source, torch.bfloat16)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    whole = checkpoint.load(source, torch.bfloat16)
    piecewise.save_as(source, whole.state_dict().items(), tmp_path / "out")
    again = checkpoint.save(whole, tmp_path / "whole")
    assert checkpoint.weights_digest(tmp_path / "out") == checkpoint.weights_digest(again)
    assert (tmp_path / "out" / "config.json").read_text() == (again / "config.json").read_text()


def test_tensors_are_requested_one_after_the_other(tiny_model: Any, tmp_path: Path) -> None:
    """When the next one is made, those of earlier files have left memory: they are on the disk."""
    source, counts = checkpoint.save(tiny_model("llama"), tmp_path / "model"), []

    def given() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in checkpoint.load(source).state_dict().items():
            counts.append(len(list(tmp_path.glob(".*/piece-*"))))
            yield name, tensor

    piecewise.save_as(source, given(), tmp_path / "out", shard=1)
    assert counts == [max(0, index - 1) for index in range(len(counts))]


def test_other_tensors_are_refused_and_nothing_is_left(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama")
    source, state = checkpoint.save(model, tmp_path / "model"), model.state_dict()
    state["model.norm.weight"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"expected the tensors of .*model; others are .*model.norm.weight.*\(3,\)"):
        piecewise.save_as(source, state.items(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_hub_name_is_read_from_the_hubs_cache(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint.save(tiny_model("llama"), tmp_path / "model")
    name = put_in_hub_cache(monkeypatch, tmp_path / "hub", "someone/tiny", source)
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(filled(name, torch.float32)(ids).logits, checkpoint.load(source)(ids).logits)
    with pytest.raises(CheckpointError, match="someone/none"):
        piecewise.outline("someone/none", torch.float32)
