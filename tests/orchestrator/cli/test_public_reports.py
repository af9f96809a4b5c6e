"""Faults that users of other tools have reported in public, tried here: each input, and what is right for it.

A row of `REPORTS` is one report; the tests marked with its number hold the right behaviour. `LATER`: what is not
there yet, where a test holds that it is refused or documented.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from bad_input_folder import byte_tokenizer, edit_json, edit_weights, run_in
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from attention.conversion.convert import convert as convert_model
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan

Tiny = Callable[..., Any]
REPOSITORY = Path(__file__).resolve().parents[3]


class Report(NamedTuple):
    """Links to the threads, the input, and the right behaviour."""

    links: tuple[str, ...]
    input: str
    right: str


REPORTS = {
    1: Report(
        ("jundot/omlx/issues/2129",),
        "a model with `rope_type: llama3`, converted to counts of each layer's own",
        "its tokenizer loads with and without remote code",
    ),
    2: Report(
        ("vllm-project/vllm/issues/51744", "vllm-project/vllm/issues/52768"),
        "config.json with `per_layer_config`",
        "read as counts of each layer's own, or refused with exit code 2",
    ),
    3: Report(
        ("huggingface/transformers/pull/46211",),
        "a Llama whose width is no multiple of its heads (kanana-1.5: 1792 / 24 / 128)",
        "converted, and loads again",
    ),
    4: Report(
        ("Blaizzy/mlx-vlm/issues/303", "ml-explore/mlx-lm/pull/86"),
        "the DeciLM export in mlx-lm",
        "`ffn_mult`, which it knows, where that is exact; documented",
    ),
    5: Report(
        ("sgl-project/sglang/pull/9067",),
        "the DeciLM export in SGLang",
        "documented: one count for all layers loads, counts of each layer's own do not",
    ),
    6: Report(
        ("VainF/Torch-Pruning/issues/516", "VainF/Torch-Pruning/issues/512"),
        "24 query heads over 8 KV heads, to 4, 3 and 1",
        "every count loads again in stock transformers",
    ),
    7: Report(
        ("vllm-project/vllm/pull/42624", "vllm-project/vllm/pull/44158"),
        "an export of a model with a base of rotary embedding of its own",
        "`rope_theta` stands in config.json in both forms",
    ),
    8: Report(
        ("huggingface/text-generation-inference/issues/3247", "hiyouga/LlamaFactory/issues/8399"),
        "a chat template in `chat_template.jinja` alone",
        "it is in every export, the GGUF file included",
    ),
    9: Report(
        ("QwenLM/Qwen3-VL-Embedding/issues/89",),
        "`tie_word_embeddings: false` and no `lm_head.weight`",
        "refused before any work; both the tensor and the key are named",
    ),
    10: Report(
        ("peremartra/optipfair/issues/20",),
        "Gemma 3 with more `layer_types` than layers",
        "refused before any work",
    ),
    11: Report(
        ("unslothai/unsloth-zoo/pull/803", "kekzl/imp/pull/1450"),
        "FP8 blocks, with scales in another shard",
        "refused with `--dequantize` named; with it converted",
    ),
    12: Report(
        ("huggingface/transformers/pull/47811", "vllm-project/vllm/pull/46755", "hiyouga/LlamaFactory/pull/10794"),
        "fewer KV heads than GPUs of tensor parallelism",
        "`--tensor-parallel` reports bytes per GPU; counts that fit no number of GPUs are refused",
    ),
    13: Report(
        ("vllm-project/llm-compressor/issues/2176",),
        "a checkpoint with calibrated `k_scale` and `v_scale`",
        "they are named and not carried over: they belong to the former heads",
    ),
    14: Report(
        (
            "deepspeedai/DeepSpeed/issues/5405",
            "deepspeedai/Megatron-DeepSpeed/issues/439",
            "ray-project/ray/issues/36257",
            "ray-project/ray/issues/30649",
            "ray-project/ray/issues/20473",
        ),
        "ZeRO state on another number of workers; MLflow runs of resumed trials",
        "training goes on; one run per trial, no error about parameters",
    ),
    15: Report(
        (
            "vllm-project/vllm/pull/24859",
            "vllm-project/vllm/pull/24873",
            "huggingface/transformers/pull/40840",
        ),
        "a Qwen3 with counts of each layer's own, exported for vLLM",
        "exported at the plan's own bytes, by `per_layer_config`",
    ),
}
LATER = {
    5: "counts of each layer's own in SGLang need a change there",
    12: "bytes per GPU for a number of GPUs in estimate and export",
    13: "scales per head of the new count",
}
COVERED = {  # by tests that need workers or a store, elsewhere
    14: (
        ("tests/trainers/test_resharding.py", "def test_"),
        ("tests/orchestrator/tracking/test_sync.py", "def test_a_trial_that_resumes_is_taken_up_in_its_run"),
        ("tests/orchestrator/tracking/test_tracking.py", "def test_an_interrupted_search_is_taken_up_in_the_same_runs"),
    ),
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PAIRS = LayerPlan((0, 0, 1, 1), (0, 0, 1, 1))
SINGLE = LayerPlan((0, 0, 0, 0), (0, 0, 0, 0))
PER_LAYER = AttentionPlan((PAIRS, SINGLE), head_dim=8)
TEXTS = [
    *("--data", "notes.txt", "--calibration-tokens", "64"),
    *("--eval-data", "notes.txt", "--eval-tokens", "64", "--sequence-length", "32"),
]
OPEN_TOKENIZERS = """
import sys
from transformers import AutoTokenizer
for trusted in (False, True):
    for folder in sys.argv[1:]:
        assert AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)("a b").input_ids, folder
"""


def of_report(number: int) -> Any:
    """Mark of a test: the report that it is of."""

    def mark(test: Any) -> Any:
        TESTED.add(number)
        return pytest.mark.parametrize("number", [number])(test)

    return mark


TESTED: set[int] = set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of the commands, with a text."""
    lines = [f"Paragraph {n}: heads that are alike may share what they keep, {n * n} times." for n in range(300)]
    (tmp_path / "notes.txt").write_text("\n\n".join(lines))
    return tmp_path


def stored(tiny_model: Tiny, folder: Path, family: str = "llama", **settings: Any) -> Path:
    """A tiny checkpoint `model` in a folder, with a tokenizer of bytes."""
    model = tiny_model(family, vocab_size=257, **settings)
    return checkpoint.save(model, folder / "model", byte_tokenizer())


def per_layer(tiny_model: Tiny, folder: Path, family: str = "llama", **settings: Any) -> Path:
    """The same, converted to two KV heads in the first layer and one in the second, as `converted`."""
    model = checkpoint.load(stored(tiny_model, folder, family, **settings))
    return checkpoint.save(convert_model(model, PER_LAYER), folder / "converted", folder / "model")


def convert(folder: Path, *options: str, recipe: str = "gqa") -> Any:
    return run_in(folder, ["convert", "--model", "model", "--recipe", recipe, *options, *TEXTS])


@pytest.mark.extended
@of_report(1)
def test_the_tokenizer_of_a_scaled_rope_loads_in_a_clean_process(number: int, folder: Path, tiny_model: Tiny) -> None:
    per_layer(tiny_model, folder, rope_parameters=ROPE)
    ran = run_in(folder, ["export", "converted", "--target", "vllm", "--out", "exported"])
    assert ran.code == 0, ran.err
    done = subprocess.run(
        [sys.executable, "-c", OPEN_TOKENIZERS, "converted", "exported"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@of_report(2)
@pytest.mark.parametrize("verb", ["estimate", "convert", "inspect"])
def test_counts_by_layer_in_a_config_are_read_or_refused(
    number: int, verb: str, folder: Path, tiny_model: Tiny
) -> None:
    model = stored(tiny_model, folder)
    edit_json(model / "config.json", per_layer_config={"1": {"num_key_value_heads": 2}})

    def narrower(tensors: dict[str, torch.Tensor]) -> None:
        for side in ("k_proj", "v_proj"):
            name = f"model.layers.1.self_attn.{side}.weight"
            tensors[name] = tensors[name][:16].clone()

    edit_weights(model / "model.safetensors", narrower)
    arguments = {
        "estimate": ["estimate", "--model", "model", "--recipe", "gqa", "--kv-ratio", "0.5"],
        "convert": ["convert", "--model", "model", "--recipe", "gqa", "--kv-ratio", "0.5", *TEXTS],
        "inspect": ["inspect", "model", "--kv-ratio", "0.5", *TEXTS],
    }
    ran = run_in(folder, arguments[verb])
    assert ran.code in (0, 2), ran.err
    assert "AmbiguousGlobal" not in ran.err and "Traceback" not in ran.err
    assert ran.code == 0 or "was converted already and keeps 12 of 16 key and value heads" in ran.err


@of_report(3)
def test_a_llama_whose_width_is_no_multiple_of_its_heads_is_converted(
    number: int, folder: Path, tiny_model: Tiny
) -> None:
    model = stored(tiny_model, folder, "mistral", hidden_size=36, num_attention_heads=8, num_key_value_heads=4)
    edit_json(model / "config.json", model_type="llama", architectures=["LlamaForCausalLM"], sliding_window=None)
    ran = convert(folder, "--kv-ratio", "0.5", "--out", "half")
    assert ran.code == 0, ran.err
    assert AutoModelForCausalLM.from_pretrained(folder / "half").config.num_key_value_heads == 2


@of_report(4)
def test_mlx_lm_knows_all_settings_of_the_decilm_export(number: int, folder: Path, tiny_model: Tiny) -> None:
    per_layer(tiny_model, folder, intermediate_size=256)
    ran = run_in(folder, ["export", "converted", "--target", "vllm", "--out", "exported"])
    assert ran.code == 0, ran.err
    blocks = json.loads((folder / "exported" / "config.json").read_text())["block_configs"]
    ffn = {"no_op": False, "replace_with_linear": False, "ffn_mult": 12.0}
    assert all(block["ffn"] == ffn for block in blocks)
    assert re.search(r"\| mlx-lm .*\| run: .*`ffn_mult`", page("reference/engines.md"))


@of_report(5)
def test_what_sglang_loads_is_documented(number: int) -> None:
    assert re.search(r"\| SGLang .*\| read: .*\| read: refused .*Variable GQA", page("reference/engines.md"))


@of_report(6)
@pytest.mark.parametrize(("ratio", "count"), [("0.5", 4), ("0.125", 1)])
def test_24_heads_over_8_are_converted_and_load_again(
    number: int, ratio: str, count: int, folder: Path, tiny_model: Tiny
) -> None:
    stored(tiny_model, folder, hidden_size=48, num_attention_heads=24, num_key_value_heads=8)
    ran = convert(folder, "--kv-ratio", ratio, "--out", "fewer", recipe="least_squares")
    assert ran.code == 0, ran.err
    assert AutoModelForCausalLM.from_pretrained(folder / "fewer").config.num_key_value_heads == count


@of_report(6)
def test_24_heads_over_8_are_converted_to_3(number: int, folder: Path, tiny_model: Tiny) -> None:
    stored(tiny_model, folder, hidden_size=48, num_attention_heads=24, num_key_value_heads=8)
    ran = convert(folder, "--kv-heads", "3", "--out", "fewer", recipe="least_squares")
    assert ran.code == 0, ran.err
    ran = run_in(folder, ["export", "fewer", "--target", "gqa", "--out", "stock"])
    assert ran.code == 0, ran.err
    assert AutoModelForCausalLM.from_pretrained(folder / "stock").config.num_key_value_heads == 3


@of_report(7)
@pytest.mark.parametrize("target", ["gqa", "vllm"])
def test_the_base_of_rotary_embedding_stands_in_both_forms(
    number: int, target: str, folder: Path, tiny_model: Tiny
) -> None:
    stored(tiny_model, folder, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    assert convert(folder, "--kv-ratio", "0.5", "--out", "half").code == 0
    ran = run_in(folder, ["export", "half", "--target", target, "--out", "exported"])
    assert ran.code == 0, ran.err
    written = json.loads((folder / "exported" / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 500_000.0


@of_report(8)
@pytest.mark.parametrize("target", ["gqa", "vllm", "transformers", "gguf"])
def test_a_chat_template_of_its_own_file_is_in_every_export(
    number: int, target: str, folder: Path, tiny_model: Tiny
) -> None:
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    model = stored(tiny_model, folder)
    (model / "chat_template.jinja").write_text(template)
    assert "chat_template" not in json.loads((model / "tokenizer_config.json").read_text())
    assert convert(folder, "--kv-ratio", "0.5", "--out", "half").code == 0
    ran = run_in(folder, ["export", "half", "--target", target, "--out", "exported"])
    assert ran.code == 0, ran.err
    if target != "gguf":
        assert (folder / "exported" / "chat_template.jinja").read_text() == template
        return
    from gguf import GGUFReader

    field = GGUFReader(folder / "exported" / "model.gguf").fields["tokenizer.chat_template"]
    assert bytes(field.parts[-1]).decode() == template


@of_report(9)
def test_a_missing_output_matrix_is_named(number: int, folder: Path, tiny_model: Tiny) -> None:
    without_output_matrix(tiny_model, folder)
    ran = convert(folder, "--kv-ratio", "0.5")
    assert ran.code == 2 and "lm_head.weight" in ran.err and "Traceback" not in ran.err, ran.err


@of_report(9)
def test_a_missing_output_matrix_is_refused_with_the_tying_key(number: int, folder: Path, tiny_model: Tiny) -> None:
    without_output_matrix(tiny_model, folder)
    assert "tie_word_embeddings" in convert(folder, "--kv-ratio", "0.5").err


@of_report(10)
@pytest.mark.parametrize("verb", ["estimate", "convert"])
def test_more_layer_types_than_layers_are_refused(number: int, verb: str, folder: Path, tiny_model: Tiny) -> None:
    model = stored(tiny_model, folder, "gemma3_text")
    edit_json(model / "config.json", layer_types=["full_attention"] * 4)
    texts = TEXTS if verb == "convert" else []
    ran = run_in(folder, [verb, "--model", "model", "--recipe", "gqa", "--kv-ratio", "0.5", *texts])
    assert ran.code == 2 and "layer_types" in ran.err and "Traceback" not in ran.err, ran.err


@of_report(11)
def test_fp8_blocks_are_refused(number: int, folder: Path, tiny_model: Tiny) -> None:
    in_fp8_blocks(stored(tiny_model, folder))
    ran = convert(folder, "--kv-ratio", "0.5")
    assert ran.code == 2 and "fp8" in ran.err and "Traceback" not in ran.err, ran.err


@of_report(11)
def test_the_refusal_of_fp8_blocks_names_the_way_out(number: int, folder: Path, tiny_model: Tiny) -> None:
    in_fp8_blocks(stored(tiny_model, folder))
    assert "--dequantize" in convert(folder, "--kv-ratio", "0.5").err


@of_report(11)
@pytest.mark.parametrize("layerwise", [[], ["--layerwise"]], ids=["in memory", "layer by layer"])
def test_fp8_blocks_with_scales_in_another_shard_are_converted(
    number: int, layerwise: list[str], folder: Path, tiny_model: Tiny
) -> None:
    exact = in_fp8_blocks(stored(tiny_model, folder))
    ran = convert(folder, "--kv-ratio", "0.5", "--dequantize", "--out", "half", *layerwise)
    assert ran.code == 0, ran.err
    shards = sorted((folder / "half").glob("*.safetensors"))
    kept = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    name = "model.layers.0.mlp.up_proj.weight"  # which no conversion touches
    assert torch.equal(kept[name].float(), exact[name].to(kept[name].dtype).float())


@of_report(12)
def test_bytes_per_gpu_are_reported_and_counts_that_fit_none_are_refused(
    number: int, folder: Path, tiny_model: Tiny
) -> None:
    stored(tiny_model, folder)
    estimate = ["estimate", "--model", "model", "--recipe", "gqa", "--json", "estimate.json"]
    ran = run_in(folder, [*estimate, "--kv-ratio", "0.5", "--tensor-parallel", "4"])
    assert ran.code == 0, ran.err
    assert "this saves nothing there" in ran.out
    ranks = json.loads((folder / "estimate.json").read_text())["tensor_parallel"]
    assert ranks["kv_bytes_per_token_per_gpu"] == ranks["kv_bytes_per_token_per_gpu_original"]
    ran = run_in(folder, [*estimate, "--kv-ratio", "0.5", "--tensor-parallel", "3"])
    assert (ran.code, "cannot be divided among 3 GPUs" in ran.err) == (2, True)
    per_layer(tiny_model, folder)
    export = ["export", "converted", "--target", "vllm", "--out", "exported", "--json", "export.json"]
    ran = run_in(folder, [*export, "--tensor-parallel", "3"])
    assert (ran.code, "query heads cannot be divided among 3 GPUs" in ran.err) == (2, True)
    assert not (folder / "exported").exists()
    ran = run_in(folder, [*export, "--tensor-parallel", "2"])
    assert ran.code == 0, ran.err
    exported = json.loads((folder / "export.json").read_text())
    ranks, heads = exported["tensor_parallel"], exported["kv_heads"]
    assert heads == [2, 1]
    assert ranks["kv_bytes_per_token_per_gpu"] * 2 == exported["kv_bytes_per_token_after"] * 4 / 3
    assert ranks["replicated_layers"] == 1
    card = (folder / "exported" / "README.md").read_text()
    assert "this model, on each of 2 GPUs" in card
    assert "--tensor-parallel-size 2" in card


@of_report(13)
def test_scales_of_a_quantised_cache_are_named_and_not_carried_over(
    number: int, folder: Path, tiny_model: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    model = stored(tiny_model, folder)
    scales = {f"model.layers.{layer}.self_attn.{side}_scale": torch.ones(4) for layer in (0, 1) for side in "kv"}
    edit_weights(model / "model.safetensors", lambda tensors: tensors.update(scales))
    ran = convert(folder, "--kv-ratio", "0.5", "--out", "half")
    assert ran.code == 0, ran.err
    assert "not used: model.layers.0.self_attn.k_scale" in caplog.text  # on stderr in a separate process
    ran = run_in(folder, ["export", "model", "--target", "vllm", "--out", "exported"])
    assert ran.code == 0, ran.err
    for written in ("half", "exported"):
        assert not [name for name in load_file(folder / written / "model.safetensors") if name.endswith("_scale")]


@of_report(13)
def test_the_scheme_of_a_quantised_cache_is_left_out_with_a_message(
    number: int, folder: Path, tiny_model: Tiny
) -> None:
    """Plain weights, and scales of the cache alone, as a calibration of `kv_cache_scheme` leaves them."""
    model = stored(tiny_model, folder)
    scales = {f"model.layers.{layer}.self_attn.{side}_scale": torch.ones(1) for layer in (0, 1) for side in "kv"}
    edit_weights(model / "model.safetensors", lambda tensors: tensors.update(scales))
    config = json.loads((model / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    ran = convert(folder, "--kv-ratio", "0.5", "--out", "half")
    assert (ran.code, "--dequantize" in ran.err) == (2, True)
    ran = convert(folder, "--kv-ratio", "0.5", "--out", "half", "--dequantize")
    assert ran.code == 0, ran.err
    output = ran.out + ran.err
    assert "4 scales of activations and caches are left out" in output and "its kv_cache_scheme is left out" in output
    assert "quantization_config" not in json.loads((folder / "half" / "config.json").read_text())
    assert not [name for name in load_file(folder / "half" / "model.safetensors") if name.endswith("_scale")]


@of_report(14)
def test_resharding_and_resumed_runs_have_tests(number: int) -> None:
    for file, name in COVERED[number]:
        assert name in (REPOSITORY / file).read_text(), file


@of_report(15)
def test_a_qwen3_with_counts_by_layer_is_exported_for_vllm(number: int, folder: Path, tiny_model: Tiny) -> None:
    per_layer(tiny_model, folder, "qwen3")
    ran = run_in(folder, ["export", "converted", "--target", "vllm", "--out", "exported"])
    assert ran.code == 0, ran.err
    report = json.loads((folder / "exported" / "export.json").read_text())
    assert len(set(report["kv_heads"])) > 1
    assert report["kv_bytes_per_token_after"] == report["kv_bytes_per_token_before"]
    assert "per_layer_config" in json.loads((folder / "exported" / "config.json").read_text())


def test_every_report_has_a_test() -> None:
    assert set(REPORTS) == TESTED == set(range(1, 16)) and set(LATER) | set(COVERED) <= TESTED
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+/(issues|pull)/\d+", link) for r in REPORTS.values() for link in r.links)


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text()


def without_output_matrix(tiny_model: Tiny, folder: Path) -> None:
    model = stored(tiny_model, folder, "qwen3")
    edit_weights(model / "model.safetensors", lambda tensors: tensors.pop("lm_head.weight"))


def in_fp8_blocks(model: Path, block: int = 16) -> dict[str, torch.Tensor]:
    """Write the projections of a checkpoint as FP8 blocks, their scales in a second shard; return what they stand for,
    by name."""
    tensors, scales, exact = load_file(model / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = (size // block for size in tensor.shape)
        blocks = tensor.float().reshape(rows, block, columns, block)
        scale = blocks.abs().amax((1, 3)) / 448
        small = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        exact[name] = (small.float() * scale[:, None, :, None]).reshape(tensor.shape)
        tensors[name], scales[f"{name}_scale_inv"] = small.reshape(tensor.shape), scale
    shards = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": scales}
    for name, part in shards.items():
        save_file(part, model / name, metadata={"format": "pt"})
    (model / "model.safetensors").unlink()
    where = {key: name for name, part in shards.items() for key in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    quantised = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    edit_json(model / "config.json", quantization_config=quantised)
    return exact
