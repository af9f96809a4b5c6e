"""Conversion layer by layer from disk, the same plan and weights as in memory; killed and resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parameters import extended
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from verbs import convert_checkpoint, convert_layerwise

from attention.base import progress
from attention.families import families
from attention.io import checkpoint
from attention.io.layers import metrics
from attention.io.layers.windows import LazyWeights, OutputHead, WeightsError, advance, embed, open_window
from attention.io.safetensors_files import stored_tensors
from orchestrator.config.schema import ConfigError
from orchestrator.conversion import disk_planning
from orchestrator.conversion.disk_store import DiskStore

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"calibration_tokens": 768, "eval_tokens": 384, "sequence_length": 48, "device": "cpu"}
QUICK = {"refinement.fit_steps": 12}
Tiny = Callable[..., PreTrainedModel]


@pytest.fixture(scope="module", autouse=True)
def texts(little_text: str) -> None:
    """Read by all tests here: what they are about are weights."""
    SMALL.update(calibration_data=little_text, eval_data=little_text)


def stored(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase, shard: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)
    return folder


def logits(folder: Path | str, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return checkpoint.load(folder, torch.float32)(tokens).logits


def both_ways(source: Path, recipe: str, ratio: float, tmp_path: Path, **settings: Any) -> tuple[dict, dict]:
    """Records of the conversion in memory and of the layerwise one, in `memory` and `stream` of `tmp_path`."""
    settings = SMALL | settings
    memory = convert_checkpoint(source, recipe, ratio, tmp_path / "memory", **settings)
    layerwise = convert_layerwise(source, recipe, ratio, tmp_path / "stream", progress=lambda _: None, **settings)
    return memory, layerwise


def assert_same(memory: dict, layerwise: dict, vocabulary: int, windows: bool = False, close: float = 1e-4) -> None:
    assert layerwise["plan"] == memory["plan"]
    for name in ("original_loss", "loss", "kl", "loss_increase", "loss_increase_stderr"):
        assert layerwise[name] == pytest.approx(memory[name], abs=1e-4)
    for name in ("calibration_data", "eval_data", "eval_documents_left_out", "sequence_length"):
        assert layerwise[name] == memory[name]
    for name in ("parameters", "kv_bytes_per_token", "eval_tokens", "calibration_tokens"):
        assert layerwise[name] == memory[name]
    planned = layerwise["cache_tokens"] * layerwise["kv_bytes_per_token"]
    cached = layerwise["cache_bytes_measured"]
    assert 0 < cached < planned if windows else cached == planned
    tokens = torch.randint(0, vocabulary, (2, 40), generator=torch.Generator().manual_seed(0))
    difference = (logits(layerwise["out"], tokens) - logits(memory["out"], tokens)).abs().max()
    assert difference < close


@pytest.mark.parametrize("family", sorted(set(families()) - {"gemma4_text"}))  # which is converted in memory alone
def test_windows_run_the_model_of_every_family(family: str, tiny_model: Tiny, tmp_path: Path) -> None:
    """More sequences than the vocabulary has tokens, of which some never occur; weights in several files."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    config = checkpoint.load_config(tmp_path)
    weights = LazyWeights(tmp_path, config)
    tokens = torch.randint(0, 60, (70, 24), generator=torch.Generator().manual_seed(0))
    streams = embed(weights, config, tokens, torch.float32, CPU)
    for layer in range(2):
        advance(open_window(weights, config, layer, streams, torch.float32, CPU), streams, 8)
    with torch.no_grad():
        expected = model(tokens).logits
    above = OutputHead(weights, config, torch.float32, CPU).final(streams)
    torch.testing.assert_close(above.head(above.states), expected, atol=1e-5, rtol=1e-5)


def test_a_missing_tensor_is_named(tiny_model: Tiny, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    config = checkpoint.load_config(tmp_path)
    weights = LazyWeights(tmp_path, config)
    with pytest.raises(WeightsError, match=r"layers\.7\.mlp"):
        weights.one("model.layers.7.mlp.up_proj.weight", torch.float32)
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="save the weights as safetensors"):
        LazyWeights(tmp_path, config)


RECIPES = [
    extended("gqa", {}, id="gqa"),
    extended("least_squares", {}, id="least_squares"),
    pytest.param("headfold_gqa", QUICK, id="fit_heal"),
    extended("align", {"relaxation": "none"}, id="align"),
    extended("headfold_gqa", {"refinement": "heal", "together": False}, id="apart"),
    pytest.param("headfold", {"refinement": "heal", "allocation.tokens": 768}, id="headfold"),
]


@pytest.mark.extended
@pytest.mark.parametrize(("recipe", "changes"), RECIPES)
def test_the_demo_checkpoint_comes_out_the_same(
    recipe: str, changes: dict[str, Any], demo_dir: Path, tmp_path: Path
) -> None:
    # In the float32 that both compute in: rounded to bfloat16, a weight on the edge may fall to either side
    more: dict[str, Any] = {"recipe_settings": changes, "dtype": "float32"}
    if changes is QUICK:
        more["eval_tokens"] = 3000  # for the bound below: on 384 tokens the standard error is a third of the increase
    memory, layerwise = both_ways(demo_dir, recipe, 0.25, tmp_path, **more)
    assert_same(memory, layerwise, 2048, close=2e-3)  # on random tokens, where what a fit makes of rounding shows
    assert layerwise["loss_increase"] > 0.01
    if changes is QUICK:  # our own recipe, with little text and few steps; test_headfold_targets.py has its quality
        assert layerwise["loss_increase"] < 0.14  # 0.10, and 0.25 without the fit


QUICKLY: dict[str, Any] = {"recipe": "headfold_gqa", "changes": QUICK}
ALIGNED: dict[str, Any] = {"recipe": "align", "changes": {"relaxation": "none"}}
MORE_FAMILIES = [
    *("gemma3_text", "glm4_moe", "gpt_neox", "granite", "minimax_m2", "olmo2", "olmoe", "phi", "phi3", "qwen3_moe"),
    *("smollm3", "stablelm"),
]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("gpt2", QUICKLY),
        ("opt", QUICKLY),
        ("qwen3", QUICKLY),
        ("gemma2", QUICKLY),
        ("gpt_oss", QUICKLY),
        ("mixtral", QUICKLY),
        ("llama", ALIGNED),
        *(extended(family, QUICKLY) for family in MORE_FAMILIES),
    ],
)
def test_other_families_come_out_the_same(
    family: str, how: dict[str, Any], tiny_model: Tiny, demo_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Fused projections, learned positions, biases, partial rotary dims, norms on queries; tied and untied outputs;
    layers that differ in window and rotary embedding; experts, in files of the same names."""
    model = tiny_model(family, vocab_size=2048, tie_word_embeddings=family in ("gpt2", "opt"))
    source = stored(model, tmp_path / "source", demo_tokenizer)
    memory, layerwise = both_ways(source, how["recipe"], 0.5, tmp_path, recipe_settings=how["changes"])
    # Logits of random weights reach some tens, and Adam's first steps enlarge what rounding makes of small gradients:
    # by how much depends on the processor (experts on one with AVX-512: 7e-4).
    assert_same(memory, layerwise, 2048, windows=family in ("gemma2", "gemma3_text", "gpt_oss"), close=1e-3)
    assert stored_tensors(tmp_path / "stream").keys() == stored_tensors(tmp_path / "memory").keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state, name: state.pop(name), "hold 4 of experts.*.w1.weight; 3 of experts.*.w3.weight"),
        (lambda state, name: state.update({name: state[name][1:].clone()}), "differ in number, shape or dtype"),
    ],
)
def test_experts_that_are_not_alike_are_refused(change: Any, message: str, tiny_model: Tiny, tmp_path: Path) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state, "model.layers.1.block_sparse_moe.experts.2.w3.weight")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="experts of model.layers.1.mlp.experts.gate_up_proj") as refused:
        LazyWeights(tmp_path, checkpoint.load_config(tmp_path))
    assert message in str(refused.value) and str(tmp_path) in str(refused.value)


def test_the_result_is_bfloat16_shards_that_stock_transformers_loads(
    tiny_model: Tiny, demo_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = tiny_model("llama", vocab_size=2048, tie_word_embeddings=True, dtype=torch.bfloat16)
    source = stored(model, tmp_path / "source", demo_tokenizer, "100KB")
    created = convert_layerwise(source, "least_squares", 0.5, tmp_path / "out", dtype="bfloat16", **SMALL)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4  # the embedding, two layers, the last norm
    assert index["metadata"]["total_size"] == 2 * created["parameters"]
    assert "lm_head.weight" not in index["weight_map"]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert type(stock).__name__ == "LlamaForCausalLM"
    assert stock.dtype == torch.bfloat16
    assert stock.config.num_key_value_heads == 2
    assert (
        checkpoint.plan_of(stock).digest != created["plan_digest"]
    )  # heads are permuted so that groups are neighbours
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.extended
def test_the_layer_and_what_is_done_with_it_are_shown(
    demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages without steps are reported by the layer's number: at real width each takes a minute and more."""
    monkeypatch.setattr(progress, "_LOOK_SECONDS", 0.002)
    lines: list[str] = []
    with progress.show_progress("convert", lines.append, 0.0):
        more = {"progress": lines.append, "recipe_settings": QUICK | {"allocation.fit_steps": 12}}
        convert_layerwise(demo_dir, "headfold", 0.5, tmp_path / "out", **more, **SMALL)
    output = {line.partition(":")[0] for line in lines}
    planned = {f"layer {layer} of 4, what each head count costs" for layer in range(1, 5)}
    assert planned | {f"layer {layer} of 4, running both models" for layer in range(1, 5)} <= output


def test_a_killed_conversion_resumes_at_the_layer_it_reached(
    tiny_model: Tiny, demo_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", vocab_size=2048, num_hidden_layers=4)
    source = stored(model, tmp_path / "source", demo_tokenizer)
    run = {"recipe_settings": QUICK, **SMALL}
    whole = convert_layerwise(source, "headfold_gqa", 0.5, tmp_path / "whole", **run)
    done: list[int] = []
    convert_layer = DiskStore.convert_layer

    def until_the_third(self: Any, layer: int, *args: Any) -> Any:
        if layer == 2 and len(done) == 2:
            raise KeyboardInterrupt
        done.append(layer)
        return convert_layer(self, layer, *args)

    monkeypatch.setattr(DiskStore, "convert_layer", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        convert_layerwise(source, "headfold_gqa", 0.5, tmp_path / "out", **run)
    assert not (tmp_path / "out").exists()
    done.append(-1)
    output: list[str] = []
    resumed = convert_layerwise(source, "headfold_gqa", 0.5, tmp_path / "out", progress=output.append, **run)
    assert done == [0, 1, -1, 2, 3]
    assert "going on after layer 2" in output[0]
    assert resumed["plan"] == whole["plan"]
    assert resumed["fits"] == whole["fits"]
    names = [f"model-{i:05d}-of-00006.safetensors" for i in range(1, 7)]
    assert all((tmp_path / "out" / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)

    done.clear()
    with pytest.raises(KeyboardInterrupt, match="2 finished layer.s. are kept in"):
        convert_layerwise(source, "headfold_gqa", 0.5, tmp_path / "out", overwrite=True, **run)
    done.append(-1)
    again = {"progress": output.append, "overwrite": True, **run}
    convert_layerwise(source, "headfold_gqa", 0.25, tmp_path / "out", **again)
    assert done == [0, 1, -1, 0, 1, 2, 3]
    assert "starting over" in output[-5]


@pytest.mark.parametrize("step", ["advance", "_back"], ids=["up", "down"])
def test_a_conversion_that_is_killed_in_the_sensitivity_passes_continues_there(
    step: str, tiny_model: Tiny, demo_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: Any
) -> None:
    source = stored(tiny_model("llama", vocab_size=2048, num_hidden_layers=4), tmp_path / "source", demo_tokenizer)
    run: dict[str, Any] = {"recipe_settings": {**QUICK, "allocation.tokens": 480}, **SMALL}
    calls, pass_layer = [0], getattr(metrics, step)

    def until_the_third(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return pass_layer(*arguments)

    monkeypatch.setattr(metrics, step, until_the_third)
    with pytest.raises(KeyboardInterrupt, match="what the plan rests on is kept in"):
        convert_layerwise(source, "headfold_layers", 0.5, tmp_path / "out", **run)
    convert_layerwise(source, "headfold_layers", 0.5, tmp_path / "out", **run)
    assert calls == [5], "two layers, the third that was killed, and it again with the fourth"


@pytest.mark.extended
@pytest.mark.parametrize("recipe", [extended("headfold"), "headfold_layers"])
def test_a_plan_of_all_layers_is_that_of_the_whole_model_and_resumes_after_a_kill(
    recipe: str, tiny_model: Tiny, demo_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: Any
) -> None:
    source = stored(tiny_model("qwen3", vocab_size=2048, num_hidden_layers=4), tmp_path / "source", demo_tokenizer)
    changes = {**QUICK, "allocation.tokens": 480, "grouping.equal_sizes": False}
    run: dict[str, Any] = {"recipe_settings": changes, **SMALL}
    memory = convert_checkpoint(source, recipe, 0.5, tmp_path / "memory", **run)
    assert len({tuple(layer["key_map"]) for layer in memory["plan"]["layers"]}) > 1, "layers of different counts"
    planned: list[dict[str, Any]] = []
    curves_of_layer = disk_planning.curves_of_layer

    def until_the_third(*args: Any) -> Any:
        if len(planned) == 2:
            planned.append({})
            raise KeyboardInterrupt
        planned.append(curves_of_layer(*args))
        return planned[-1]

    monkeypatch.setattr(disk_planning, "curves_of_layer", until_the_third)
    with pytest.raises(KeyboardInterrupt, match="what the plan rests on is kept in"):
        convert_layerwise(source, recipe, 0.5, tmp_path / "stream", **run)
    output: list[str] = []
    layerwise = convert_layerwise(source, recipe, 0.5, tmp_path / "stream", progress=output.append, **run)
    assert len(planned) == 5 and "going on with the plan" in output[0] and "loss increases of layer 3/4" in output[1]
    assert_same(memory, layerwise, 2048, close=2e-3)  # as above
    assert not list(tmp_path.glob(".stream*"))


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        (
            "headfold",
            {"allocation.increases": "measured"},
            ["allocation.increases=measured", "--set allocation.increases=estimated"],
        ),
        ("dha", {}, ["allocation=dha", "objective=fusion_loss"]),
        ("directshare", {}, ["sharing=direct", "--set sharing=none"]),
        ("asymgqa", {"objective": "model"}, ["objective=model", "--set objective=least_squares"]),
        ("dcformer", {}, ["composition=dcmha"]),
    ],
)
def test_what_cannot_be_streamed_is_refused_with_the_setting_to_change(
    recipe: str, changes: dict[str, Any], message: list[str], demo_dir: Path, tmp_path: Path
) -> None:
    ratio = 1.0 if recipe == "directshare" else 0.5
    with pytest.raises(ConfigError) as error:
        convert_layerwise(demo_dir, recipe, ratio, tmp_path / "out", recipe_settings=changes, **SMALL)
    assert all(word in str(error.value) for word in (*message, "cannot be converted layer by layer"))
    assert not list(tmp_path.iterdir())


def test_a_streamed_conversion_needs_a_folder_and_layers_that_stand_alone(
    demo_dir: Path, tiny_model: Tiny, demo_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--out"):
        convert_layerwise(demo_dir, "gqa", 0.5, None, **SMALL)
    model = tiny_model("gpt2", vocab_size=2048, scale_attn_by_inverse_layer_idx=True)
    source = stored(model, tmp_path / "source", demo_tokenizer)
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx"):
        convert_layerwise(source, "least_squares", 0.5, tmp_path / "out", **SMALL)


def test_a_converted_checkpoint_can_be_streamed_again(
    tiny_model: Tiny, demo_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """Its maps are its own grouping: what is shared already stays together. One in Headfold's own form is refused, as
    its config does not say what it caches."""
    model = tiny_model("llama", vocab_size=2048)
    source = stored(model, tmp_path / "source", demo_tokenizer)
    first = convert_layerwise(source, "least_squares", 0.5, tmp_path / "first", **SMALL)
    changes = {"together": False, "refinement": "none"}
    apart = convert_layerwise(source, "headfold_gqa", 0.5, tmp_path / "apart", recipe_settings=changes, **SMALL)
    shutil.rmtree(source)
    memory, layerwise = both_ways(Path(first["out"]), "least_squares", 0.5, tmp_path)
    assert_same(memory, layerwise, 2048)
    with pytest.raises(ConfigError, match="keeps 8 of 16 key and value heads"):
        convert_layerwise(apart["out"], "least_squares", 0.25, tmp_path / "out", **SMALL)
