"""Folders with a number of KV heads per layer (`per_layer_config`): of every family with groups, both ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_plans import converted, plans, together
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attention.families import families, geometry_of, window_of
from attention.io import checkpoint
from attention.io.export import export, probe
from attention.io.piecewise import outline
from attention.io.sources import CheckpointError
from attention.io.targets import TargetError, target
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan
from search_spaces.recipes.catalogue import recipe
from search_spaces.recipes.engine_form import EngineForm

Tiny = Callable[..., PreTrainedModel]
EVEN = AttentionPlan(together((0, 1, 1, 0), (0, 0, 0, 0)), 8)
ONE_COUNT = "gemma4_text"  # for all layers with a window


def is_grouped(name: str, model: PreTrainedModel) -> bool:
    return families()[name].plain_config(model.config, 1) is not None


def exported(model: PreTrainedModel, plan: AttentionPlan, folder: Path) -> Path:
    """The export of a model of this plan, which `folder / "source"` keeps in Headfold's own format."""
    source = checkpoint.save(converted(model, plan), folder / "source")
    report = export(source, "per_layer", folder / "out")
    assert report.exact and report.kv_heads == tuple(layer.key_heads for layer in plan.layers)
    return folder / "out"


@pytest.mark.parametrize("family", sorted(families()))
def test_the_export_computes_what_the_converted_model_does(family: str, tiny_model: Tiny, tmp_path: Path) -> None:
    model = tiny_model(family)
    if family == ONE_COUNT:
        with pytest.raises(TargetError, match=r"one for all layers with a window, got \[1, 2\].*headfold_gqa"):
            target("per_layer").support_for(model.config, EVEN)
        return
    if not is_grouped(family, model):
        with pytest.raises(TargetError, match=r"layer 1 has 1 KV heads.*no stock GQA form"):
            target("per_layer").support_for(model.config, EVEN)
        return
    folder = exported(model, EVEN, tmp_path)
    expected = probe(checkpoint.load(tmp_path / "source", torch.float32))
    stock = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    torch.testing.assert_close(probe(stock), expected, rtol=0, atol=3e-5)
    counts = [module.k_proj.out_features // 8 for module in stock.model.layers.children() if hasattr(module, "k_proj")]
    assert not counts or counts == [2, 1]
    ids = torch.randint(64, (1, 12), generator=torch.Generator().manual_seed(0))
    created = stock.generate(ids, max_new_tokens=6, do_sample=False)  # through a cache of uneven layers
    again = stock.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(created, again)


@pytest.mark.parametrize("family", sorted(families()))
def test_the_export_is_a_checkpoint(family: str, tiny_model: Tiny, tmp_path: Path) -> None:
    model = tiny_model(family)
    if not is_grouped(family, model) or family == ONE_COUNT:
        return
    folder = exported(model, EVEN, tmp_path)
    expected = probe(checkpoint.load(tmp_path / "source", torch.float32))
    whole = checkpoint.load(folder, torch.float32)
    torch.testing.assert_close(probe(whole), expected, rtol=0, atol=3e-5)
    assert [layer.key_heads for layer in plan_of(whole).layers] == [2, 1]
    saved = checkpoint.save(whole, tmp_path / "again")
    assert "auto_map" not in json.loads((saved / "config.json").read_text())
    assert torch.equal(probe(checkpoint.load(saved, torch.float32)), probe(whole))
    assert export(saved, "per_layer", tmp_path / "third").exact
    read, weights = outline(folder, torch.float32)  # as a conversion one layer at a time reads it
    weights.read_into(dict(read.to_empty(device="cpu").named_parameters()))
    assert all(torch.equal(p, whole.get_parameter(name)) for name, p in read.named_parameters())


def test_config_json_is_the_family_s_own(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = exported(tiny_model("qwen3"), EVEN, tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    assert fields["model_type"] == "qwen3" and fields["architectures"] == ["Qwen3ForCausalLM"]
    assert fields["num_key_value_heads"] == 2 and fields["per_layer_config"] == {"1": {"num_key_value_heads": 1}}
    config = AutoConfig.from_pretrained(folder)
    assert [layer.num_key_value_heads for layer in config.per_layer_config] == [2, 1]
    with pytest.raises(RuntimeError, match="per-layer attribute"):  # and no layer of a wrong size
        AutoModelForCausalLM.from_pretrained(folder)


def test_one_count_needs_no_code(tiny_model: Tiny, tmp_path: Path) -> None:
    folder = exported(tiny_model("qwen3"), plans(8)["uniform"], tmp_path)
    assert not list(folder.glob("*.py"))
    assert "per_layer_config" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(("given", "refused"), [(3, "divi"), ("2", "num_key_value_heads"), (0, "")])
def test_counts_that_are_none_are_refused(given: object, refused: str, tiny_model: Tiny, tmp_path: Path) -> None:
    folder = exported(tiny_model("qwen3"), EVEN, tmp_path)
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | {"per_layer_config": {"1": {"num_key_value_heads": given}}}
    file.write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=f"config.json' cannot be used: .*{refused}"):
        checkpoint.load_config(folder)


@pytest.mark.parametrize("family", sorted(families()))
@pytest.mark.parametrize("name", ["per_layer", "vllm"])
def test_the_recipe_of_counts_per_layer_suits_every_family_with_groups(
    name: str, family: str, tiny_model: Tiny
) -> None:
    model = tiny_model(family)
    form = EngineForm.of(name, model.config, geometry_of(model.config))
    known = recipe("headfold_layers")
    refusals = form.refusals(vars(known), equal_groups=known.equal_groups)
    # vLLM has no qk_layernorm in StableLM, and allocates other bytes where layers have windows
    unread = name == "vllm" and (family == "stablelm" or window_of(model.config) > 0)
    assert bool(refusals) == (unread or not is_grouped(family, model) or family == ONE_COUNT), refusals
