"""The contract of every export target: the cache that it supports, or why not, before weights are read; and a complete
folder.

The targets are those that the package finds: a new file is tested here as soon as it is there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from engine_plans import converted, plans
from parameters import extended
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedModel

from attention.io import checkpoint
from attention.io.export import LargerCacheError, export, largest_difference, tolerance
from attention.io.targets import TargetError, best_target, target, targets
from attention.modeling.model_classes import plan_of_config
from attention.plan import AttentionPlan, Composition, LayerPlan

Tiny = Callable[..., PreTrainedModel]
FAMILIES = ("gpt2", "gpt_neox", "llama", "qwen3")
MORE_FAMILIES = ("gemma", "mistral", "opt", "phi", "qwen2")
PLANS = plans(8)
CASES = [
    *itertools.product(FAMILIES, [None, *PLANS]),
    *itertools.product(MORE_FAMILIES, ["uniform"]),
    *itertools.starmap(extended, itertools.product(MORE_FAMILIES, [None, *sorted(PLANS.keys() - {"uniform"})])),
]
every_target = pytest.mark.parametrize("name", sorted(targets()))


def kv_heads_in(name: str, config: Any, plan: AttentionPlan) -> tuple[int, ...]:
    """KV heads of each layer as an engine holds them: the larger of keys and values where the two differ."""
    support = target(name).support_for(config, plan)
    return tuple(map(max, support.key_heads, support.value_heads))


@pytest.fixture
def saved(tiny_model: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """`saved(family, plan)`: a folder with a tiny model of this plan."""

    def save(family: str, plan: AttentionPlan | None = None, **settings: Any) -> Path:
        tied = {"tie_word_embeddings": True} if family in ("gemma", "qwen3") else {}
        model = tiny_model(family, **(tied | settings))
        return checkpoint.save(model if plan is None else converted(model, plan), tmp_path / "model")

    return save


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"hidden_act": "relu"}, "computes a llama with silu, the model has relu"),
        ("gemma", {"hidden_activation": "silu"}, "computes a gemma with gelu, the model has silu"),
        ("gpt2", {"activation_function": "relu"}, "computes a gpt2 with gelu, the model has relu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scales scores by the head dim alone"),
        ("gpt2", {"scale_attn_weights": False}, "scales scores by the head dim alone"),
    ],
)
def test_llama_cpp_has_one_activation_and_one_scale_of_scores_for_a_family(
    family: str, settings: dict[str, Any], message: str, tiny_model: Tiny
) -> None:
    model = tiny_model(family, **settings)
    with pytest.raises(TargetError, match=message):
        target("gguf").support_for(model.config, AttentionPlan.identity(2, 4, 8))


@pytest.mark.parametrize(("family", "engines"), [("llama", ("transformers", "vLLM")), ("gemma2", ("transformers",))])
def test_vllm_does_not_load_different_counts_with_windows(
    family: str, engines: tuple[str, ...], tiny_model: Tiny
) -> None:
    config = tiny_model(family).config
    one, two = LayerPlan((0,) * 4, (0,) * 4), LayerPlan((0, 0, 1, 1), (0, 0, 1, 1))
    per_layer = target("per_layer")
    assert per_layer.engines_of(config, AttentionPlan((one, two), 8)) == engines
    assert per_layer.engines_of(config, AttentionPlan((two, two), 8)) == ("transformers", "vLLM")


def test_one_count_in_every_layer_is_a_stock_folder_that_vllm_may_not_compute(tiny_model: Tiny) -> None:
    padded = AttentionPlan((LayerPlan((0, 0, 0, 1), (0, 0, 0, 1)),) * 2, 8)
    for family, engines in (("llama", ("transformers", "vLLM")), ("qwen2", ("transformers",))):
        config = tiny_model(family).config
        assert target("per_layer").engines_of(config, padded) == engines == target("gqa").engines_of(config, padded)
    # Target gqa has as many query heads as the most KV heads and the largest group make
    uneven = AttentionPlan((LayerPlan.identity(4), LayerPlan((0, 0, 1, 1), (0, 0, 1, 1))), 8)
    assert target("gqa").engines_of(tiny_model("qwen2").config, uneven) == ("transformers",)


# ---- the contract ------------------------------------------------------------------------------------------------


@every_target
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_target_holds_a_plan_or_says_why_not_before_weights_are_read(
    name: str, family: str, kind: str | None, saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved(family, None if kind is None else PLANS[kind])
    config = checkpoint.load_config(folder)
    plan = plan_of_config(config)
    weights = (folder / "model.safetensors").rename(tmp_path / "aside")
    try:
        cached = kv_heads_in(name, config, plan)
    except TargetError as error:
        assert len(str(error)) > 30
        with pytest.raises(TargetError):
            export(folder, name, tmp_path / "out", allow_larger_cache=True)
        assert not (tmp_path / "out").exists()
        return
    assert len(cached) == plan.num_layers
    assert all(
        count >= max(layer.key_heads, layer.value_heads) for count, layer in zip(cached, plan.layers, strict=True)
    )
    promised = target(name).support_for(config, plan).bytes_per_token("float32")
    if promised > plan.kv_bytes_per_token("float32"):
        with pytest.raises(LargerCacheError, match=r"layer \d has \d pairs.*--allow-larger-cache"):
            export(folder, name, tmp_path / "out")
    weights.rename(folder / "model.safetensors")
    report = export(folder, name, tmp_path / "out", allow_larger_cache=True)
    assert report.exact and report.kv_heads == cached and report.kv_bytes_per_token_after == promised
    assert report.max_logit_difference <= tolerance(torch.float32) * max(report.max_logit, 1.0)
    assert json.loads((tmp_path / "out" / "export.json").read_text())["kv_heads"] == list(cached)
    assert checkpoint.intact(tmp_path / "out")


@every_target
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_target_rounds_once(name: str, dtype: str, saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved("gpt_neox" if name == "phi" else "llama", PLANS["unequal"])
    report = export(folder, name, tmp_path / "out", dtype=dtype, allow_larger_cache=True)
    assert report.dtype == report.cache_dtype == dtype
    assert report.max_logit_difference <= tolerance(getattr(torch, dtype), folded=name == "phi") * report.max_logit


@every_target
def test_what_fails_in_the_middle_leaves_nothing(name: str, saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved("gpt_neox" if name == "phi" else "llama", PLANS["uniform"])

    def refuse(fresh: Path, back: PreTrainedModel) -> Any:
        assert any(fresh.iterdir()) and back.config
        raise ValueError("not what was promised")

    with pytest.raises(ValueError, match="not what was promised"):
        export(folder, name, tmp_path / "out", check=refuse)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_an_unknown_target_or_dtype_is_refused(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved("llama")
    with pytest.raises(ValueError, match=r"target must be one of \['gguf'.*did you mean gguf"):
        export(folder, "ggufs", tmp_path / "out")
    with pytest.raises(ValueError, match="dtype for target gqa must be one of .* got 'q8_0'"):
        export(folder, "gqa", tmp_path / "out", dtype="q8_0")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ollama", "target gguf"),
        ("LM Studio", "target gguf"),
        ("sglang", r"target gqa \(as many KV heads in every layer"),
        ("hf", "target gqa .* and target transformers"),
    ],
)
def test_the_name_of_an_engine_is_answered_with_the_target_that_it_loads(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"target must be one of \['auto', 'gguf', .*got '{name}': .*{message}"):
        target(name, more=["auto"])


# ---- supported plans ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "family", "kind", "heads"),
    [
        ("gqa", "llama", "layers", (3, 3)),
        ("vllm", "llama", "layers", (3, 1)),
        ("vllm", "qwen2", "layers", (3, 1)),
        ("vllm", "qwen3", "layers", (3, 1)),
        ("per_layer", "qwen3", "layers", (3, 1)),
        ("per_layer", "qwen3", "apart", (4, 2)),
        ("vllm", "llama", "apart", (4, 2)),
        ("gguf", "llama", "layers", (3, 1)),
        ("gguf", "mistral", "unequal", (2, 2)),
        ("gguf", "qwen3", "layers", (3, 1)),
        ("gguf", "gemma", "layers", (3, 3)),
        ("gguf", "gpt_neox", "uniform", (2, 2)),
        ("transformers", "llama", "apart", (2, 2)),
        ("transformers", "gpt_neox", "layers", (3, 1)),
    ],
)
def test_kv_heads_of_each_layer(
    name: str, family: str, kind: str, heads: tuple[int, ...], saved: Callable[..., Path]
) -> None:
    config = checkpoint.load_config(saved(family, PLANS[kind]))
    assert kv_heads_in(name, config, PLANS[kind]) == heads


@pytest.mark.parametrize(
    ("name", "family", "plan", "message"),
    [
        ("gqa", "gpt_neox", PLANS["uniform"], "layer 0 has 2 KV heads for 4 query heads.*export to target phi"),
        ("vllm", "gpt2", PLANS["uniform"], "layer 0 has 2 KV heads.*gpt2 family has no stock GQA form"),
        ("gguf", "opt", None, "target gguf has no form for opt.*export to target vllm"),
        ("gguf", "phi", PLANS["layers"], "layer 0 has 3 KV heads.*phi2.*target transformers"),
        ("transformers", "gpt2", PLANS["uniform"], "takes the families.*got gpt2"),
        ("vllm", "llama", AttentionPlan(PLANS["uniform"].layers, 8, composition=Composition()), "layer 0 on.*dcmha"),
    ],
)
def test_a_refusal_says_what_to_do(
    name: str, family: str, plan: AttentionPlan | None, message: str, saved: Callable[..., Path]
) -> None:
    config = checkpoint.load_config(saved(family, plan))
    with pytest.raises(TargetError, match=message):
        kv_heads_in(name, config, plan or plan_of_config(config))


def test_vllm_refuses_counts_that_no_few_query_heads_hold(tiny_model: Tiny) -> None:
    heads = 11
    config = tiny_model("llama", num_attention_heads=heads, num_key_value_heads=heads, hidden_size=88).config
    maps = [tuple(min(h, count - 1) for h in range(heads)) for count in (5, 7, 11)]
    plan = AttentionPlan(tuple(LayerPlan(one, one) for one in maps), 8)
    with pytest.raises(TargetError, match=r"layer 2 has 11 KV heads, other layers \[5, 7\].*385.*target gguf"):
        kv_heads_in("vllm", config, plan)
    assert kv_heads_in("gguf", config, plan) == (5, 7, 11)


@pytest.mark.parametrize(
    ("family", "kind", "best"),
    [
        ("llama", None, "gqa"),
        ("llama", "layers", "per_layer"),
        ("llama", "apart", "transformers"),
        ("phi", "uniform", "gqa"),
        ("gpt_neox", "uniform", "phi"),
    ],
)
def test_auto_takes_the_fewest_bytes_then_the_most_engines(
    family: str, kind: str | None, best: str, saved: Callable[..., Path]
) -> None:
    config = checkpoint.load_config(saved(family, None if kind is None else PLANS[kind]))
    chosen, others = best_target(config, plan_of_config(config), "float32")
    assert chosen == best and others.keys() == targets().keys() - {best}
    assert all(len(why) > 20 for why in others.values())


def test_auto_says_why_nothing_holds_a_plan(saved: Callable[..., Path]) -> None:
    config = checkpoint.load_config(saved("gpt2", PLANS["apart"]))
    with pytest.raises(TargetError, match="no target supports this plan.*gguf: .*gqa: .*Headfold's own format"):
        best_target(config, PLANS["apart"], "float32")


# ---- GGUF --------------------------------------------------------------------------------------------------------


def test_a_gguf_file_has_the_counts_of_each_layer(saved: Callable[..., Path], tmp_path: Path) -> None:
    export(saved("llama", PLANS["layers"]), "gguf", tmp_path / "out")
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    assert fields["general.architecture"].contents() == "deci"
    assert fields["deci.attention.head_count_kv"].contents() == [3, 1]
    assert fields["deci.attention.head_count"].contents() == [6, 4]


def test_a_truncated_gguf_file_is_reported(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved("llama", PLANS["uniform"])
    export(folder, "gguf", tmp_path / "out")
    file = tmp_path / "out" / "model.gguf"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(TargetError, match="is not a whole GGUF file of this model"):
        target("gguf").read(tmp_path / "out", checkpoint.load_config(folder))


def test_a_tokenizer_of_another_model_is_refused(saved: Callable[..., Path], demo_dir: Path, tmp_path: Path) -> None:
    folder = saved("llama")  # of 64 tokens
    with pytest.raises(TargetError, match="token ids up to 2047, the model embeds 64 tokens: it is not this model's"):
        export(folder, "gguf", tmp_path / "out", demo_dir)
    assert not (tmp_path / "out").exists()


def test_a_way_of_splitting_text_that_llama_cpp_has_no_name_for_is_refused(
    saved: Callable[..., Path], demo_dir: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_dir)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer.json"
    whole = json.loads(file.read_text())
    split = {"type": "Split", "pattern": {"Regex": "[0-9]"}, "behavior": "Isolated", "invert": False}
    bytes_ = whole["pre_tokenizer"] | {"use_regex": False}
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_]}
    file.write_text(json.dumps(whole))
    with pytest.raises(TargetError, match="no known name for the way in which this tokenizer splits text"):
        export(saved("llama", vocab_size=2048), "gguf", tmp_path / "out", tmp_path / "tokenizer")


def test_a_gguf_file_has_the_chat_templates_of_their_own_files(
    saved: Callable[..., Path], demo_dir: Path, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    (tokenizer / "additional_chat_templates").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer / name).write_bytes((demo_dir / name).read_bytes())
    assert "chat_template" not in json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "chat_template.jinja").write_text("{{ messages[0].content }}")
    folder = saved("llama", PLANS["uniform"], vocab_size=2048)
    export(folder, "gguf", tmp_path / "one", tokenizer)
    fields = gguf.GGUFReader(tmp_path / "one" / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == "{{ messages[0].content }}"
    (tokenizer / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    export(folder, "gguf", tmp_path / "two", tokenizer)
    fields = gguf.GGUFReader(tmp_path / "two" / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == "{{ messages[0].content }}"
    assert fields["tokenizer.chat_template.tools"].contents() == "{{ tools }}"


def test_eight_bits_are_not_called_exact(saved: Callable[..., Path], tmp_path: Path) -> None:
    report = export(saved("llama", PLANS["uniform"]), "gguf", tmp_path / "out", dtype="q8_0")
    assert not report.exact and 0 < report.max_logit_difference < 0.2 * report.max_logit
    assert report.cache_dtype == "float16"
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert kinds == {"Q8_0", "F16", "F32"}  # rows of 48 are no whole blocks of 32


# ---- folders with code -------------------------------------------------------------------------------------------


def test_padding_that_is_not_zero_is_found(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved("llama", PLANS["layers"])
    export(folder, "vllm", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    state = load_file(file)
    assert state["model.layers.0.self_attn.k_proj.weight"].shape[0] == 3 * 8
    assert state["model.layers.1.self_attn.k_proj.weight"].shape[0] == 8
    state["model.layers.0.self_attn.o_proj.weight"] += 1
    save_file(state, file)
    with pytest.raises(TargetError, match="o of the padded heads is not what the plan's groups give"):
        target("vllm").read(tmp_path / "out", checkpoint.load_config(folder))


def test_a_model_with_maps_generates_as_the_source(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved("qwen3", PLANS["apart"])
    export(folder, "transformers", tmp_path / "out")
    source, back = checkpoint.load(folder), target("transformers").read(tmp_path / "out", None)
    prompt = torch.tensor([[1, 2, 3, 4]])
    expected = source.generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(back.generate(prompt, max_new_tokens=8, do_sample=False), expected)
    padded, mask = torch.tensor([[0, 0, 1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1, 1, 1]])
    with torch.no_grad():
        one, other = (model(padded, attention_mask=mask).logits[:, 2:] for model in (source, back))
        cache = back(prompt, use_cache=True).past_key_values
    assert largest_difference(one, other) < 1e-4
    assert [layer.keys.shape[1] for layer in cache.layers] == [2, 2]
