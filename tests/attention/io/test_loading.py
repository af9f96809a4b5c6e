"""Every weight comes from the file: what is missing, wrong or unreadable is refused before a weight is read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from attention.conversion.convert import convert
from attention.io import checkpoint, weights
from attention.io.layers.windows import LazyWeights
from attention.io.safetensors_files import INDEX, SINGLE
from attention.io.sources import CheckpointError
from attention.io.weights import WeightsError
from attention.plan import AttentionPlan, Composition, HeadShare, LayerPlan

Tiny = Callable[..., PreTrainedModel]
FAMILIES = ("gemma", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "qwen2", "qwen3")
every_family = pytest.mark.parametrize("family", FAMILIES)
IDS = torch.arange(12)[None]


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any], file: str = SINGLE) -> None:
    """Change the tensors of a file; `change` may return others instead."""
    tensors = load_file(folder / file)
    save_file(change(tensors) or tensors, folder / file, metadata={"format": "pt"})


def configure(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def refusal(folder: Path) -> str:
    """The message of the early check; loading and reading layer by layer must give the same, and read no weight
    before."""
    config = checkpoint.load_config(folder)
    with pytest.raises(WeightsError) as early:
        weights.check_weights(folder, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", no_reading)
        for attempt in (lambda: checkpoint.load(folder), lambda: LazyWeights(folder, config)):
            with pytest.raises(WeightsError) as late:
                attempt()
            assert str(late.value) == str(early.value)
    return str(early.value)


def no_reading(*_: Any, **__: Any) -> None:
    raise AssertionError("weights are read")


def mlp_weight(names: Any, layer: int = 1) -> str:
    """A projection of a layer, under the family's name."""
    return next(n for n in sorted(names) if f".{layer}." in n and n.endswith("weight") and ("fc" in n or "mlp" in n))


@pytest.fixture
def saved(tiny_model: Tiny, tmp_path: Path) -> Callable[..., Path]:
    """`saved(family, **config)`: the folder of a tiny model."""

    def save(family: str = "llama", **settings: Any) -> Path:
        tiny_model(family, **settings).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


# ---- names and shapes, in every family ---------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("tied", [False, True])
def test_whole_checkpoints_pass(family: str, tied: bool, tiny_model: Tiny, tmp_path: Path, caplog: Any) -> None:
    """Stock and Headfold form, and one saved from the model without its head; nothing is warned of."""
    model = tiny_model(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "stock")
    stored = LayerPlan((0, 1, 1, 2), (0, 0, 1, 2))
    checkpoint.save(convert(model, AttentionPlan((stored, stored), 8)), tmp_path / "own")
    for folder in (tmp_path / "stock", tmp_path / "own"):
        back = checkpoint.load(folder)
        assert set(weights.check_weights(folder, back.config)) >= set(back.state_dict())
    if tied:
        prefix = model.base_model_prefix + "."
        edit(tmp_path / "stock", lambda t: {name.removeprefix(prefix): x for name, x in t.items()})
        with torch.no_grad():
            assert torch.equal(checkpoint.load(tmp_path / "stock")(IDS).logits, model(IDS).logits)
    assert not caplog.text


@every_family
def test_what_is_missing_is_refused(family: str, saved: Callable[..., Path]) -> None:
    folder = saved(family)
    whole = load_file(folder / SINGLE)
    victim = mlp_weight(whole)

    edit(folder, lambda t: {name: x for name, x in whole.items() if name != victim})
    assert f"lacks 1 of the {len(whole)} tensors" in refusal(folder) and victim in refusal(folder)

    edit(folder, lambda t: {name.replace(".1.", ".one."): x for name, x in whole.items()})
    renamed = sum(".1." in name for name in whole)
    message = refusal(folder)
    assert (
        f"lacks {renamed} of" in message and f"and {renamed - 3} more; it has" in message and "Rename them" in message
    )

    edit(folder, lambda t: whole | {victim: torch.zeros(3, 5)})
    assert f"{victim} [3, 5] instead of {list(whole[victim].shape)}" in refusal(folder)

    edit(folder, lambda t: whole)
    fields = json.loads((folder / "config.json").read_text())
    layers = next(name for name in ("num_hidden_layers", "n_layer") if name in fields)
    kinds = dict.fromkeys(fields.keys() & {"layer_types"})  # their number must be that of the layers
    configure(folder, **kinds, **{layers: 3})
    assert "config.json says num_hidden_layers 3, the weights end after layer 1" in refusal(folder)
    configure(folder, **{layers: 1})
    assert "num_hidden_layers 1, but the weights are of 2 layers" in refusal(folder)
    configure(folder, **{layers: 10**4})
    assert f"num_hidden_layers 10000, but the weights are {len(whole)} tensors in all" in refusal(folder)


def test_layers_beyond_the_config_are_seen_without_the_models_prefix(saved: Callable[..., Path]) -> None:
    """GPT-2's own files leave it out."""
    folder = saved("gpt2", tie_word_embeddings=True)
    edit(folder, lambda t: {name.removeprefix("transformer."): x for name, x in t.items()})
    checkpoint.load(folder)
    configure(folder, n_layer=1)
    assert "n_layer" in json.loads((folder / "config.json").read_text())
    assert "num_hidden_layers 1, but the weights are of 2 layers" in refusal(folder)


def test_an_untied_output_must_be_stored(saved: Callable[..., Path]) -> None:
    folder = saved("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / SINGLE)
    configure(folder, tie_word_embeddings=False)
    assert "lacks 1 of" in refusal(folder) and "lm_head.weight" in refusal(folder)


def test_of_tied_matrices_either_or_two_equal_ones_do(saved: Callable[..., Path]) -> None:
    folder = saved("llama", tie_word_embeddings=True)
    table = "model.embed_tokens.weight"
    expected = load_file(folder / SINGLE)[table]
    for names in ((table, "lm_head.weight"), ("lm_head.weight",)):
        edit(folder, lambda t, names=names: _with_tables(t, names, expected))
        assert torch.equal(checkpoint.load(folder).state_dict()["lm_head.weight"], expected)
        assert torch.equal(LazyWeights(folder, checkpoint.load_config(folder)).one(table, torch.float32), expected)
    edit(folder, lambda t: t | {table: t["lm_head.weight"] + 1})
    assert "set tie_word_embeddings to false" in refusal(folder)


def _with_tables(tensors: dict[str, Tensor], names: tuple[str, ...], table: Tensor) -> dict[str, Tensor]:
    others = {name: x for name, x in tensors.items() if name not in ("model.embed_tokens.weight", "lm_head.weight")}
    return others | {name: table.clone() for name in names}


def test_surplus_tensors_are_reported_once(saved: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    folder = saved()
    edit(folder, lambda t: t | {f"extra.{i}.weight": torch.zeros(2) for i in range(5)})
    checkpoint.load(folder)
    checkpoint.load(folder)
    report = [record.getMessage() for record in caplog.records]
    assert len(report) == 1 and "5 tensors are not part of LlamaForCausalLM and not used" in report[0]
    assert "extra.0.weight, extra.1.weight, extra.2.weight and 2 more" in report[0]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_known_leftovers_are_not_reported(
    family: str, name: str, saved: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(family)
    edit(folder, lambda t: t | {name: torch.zeros(4)})
    checkpoint.load(folder)
    assert not caplog.text


@pytest.mark.parametrize(
    "plan",
    [
        AttentionPlan((LayerPlan.identity(4),) * 2, 8, (HeadShare(1, 2, 0, 1),)),
        AttentionPlan((LayerPlan.identity(4),) * 2, 8, (), Composition()),
    ],
    ids=["shared", "composed"],
)
def test_headfolds_own_parts_must_be_there(plan: AttentionPlan, tiny_model: Tiny, tmp_path: Path) -> None:
    folder = checkpoint.save(convert(tiny_model("llama"), plan), tmp_path / "own", plain=False)
    checkpoint.load(folder)
    part = next(n for n in load_file(folder / SINGLE) if "own_weight" in n or "composition" in n)
    # The maps of heads follow from the config: a folder without them loads
    edit(folder, lambda t: {name: x for name, x in t.items() if name not in (part, "model.layers.0.self_attn.key_map")})
    with pytest.raises(WeightsError, match="lacks 1 of"):
        checkpoint.load(folder)


def test_transformers_own_findings_are_read_too(tiny_model: Tiny, tmp_path: Path) -> None:
    """As for a hub name, whose files are not checked before."""
    model = tiny_model("llama")
    info = {"missing_keys": {"a.b"}, "unexpected_keys": set(), "mismatched_keys": set()}
    with pytest.raises(WeightsError, match=r"org/name lacks 1 of .*a\.b"):
        weights.check_loaded("org/name", model, info)
    info = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": {("c", (1,), (2,))}}
    with pytest.raises(WeightsError, match=r"c \[1\] instead of \[2\]"):
        weights.check_loaded("org/name", model, info)


# ---- files -------------------------------------------------------------------------------------------------------


def sharded(model: PreTrainedModel, folder: Path) -> list[Path]:
    model.save_pretrained(folder, max_shard_size="20KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    return shards


def test_shards(tiny_model: Tiny, tmp_path: Path) -> None:
    model = tiny_model("llama")
    shards = sharded(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(checkpoint.load(tmp_path)(IDS).logits, model(IDS).logits)
    whole = shards[1].read_bytes()

    shards[1].write_bytes(whole[:-100])
    message = refusal(tmp_path)
    assert (
        f"{shards[1]} cannot be read: it is truncated: {len(whole) - 100:,} bytes of at least {len(whole):,}" in message
    )

    shards[1].write_bytes(whole[:20])
    assert "truncated: 20 bytes" in refusal(tmp_path)

    shards[1].unlink()
    assert f"lacks 1 of the {len(shards)} files that {INDEX} names: {shards[1].name}" in refusal(tmp_path)

    shards[1].write_bytes(shards[0].read_bytes())
    assert "is in both" in refusal(tmp_path)

    shards[1].write_bytes(whole)
    first = next(iter(load_file(shards[1])))
    edit(tmp_path, lambda t: {name: x for name, x in t.items() if name != first}, shards[1].name)
    assert f"{shards[1]} has no tensor {first!r}, which {INDEX} says it has" in refusal(tmp_path)

    (tmp_path / INDEX).write_text("[]")
    assert "is not an index of safetensors files" in refusal(tmp_path)
    (tmp_path / INDEX).unlink()
    assert f"shards, but no {INDEX}" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "it is empty"),
        (b"<!doctype html><html>Sign in", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (b"PK\x03\x04 and so on", "a pickle"),
        (b"nothing of the kind", "not safetensors"),
        ((4).to_bytes(8, "little") + b"{!!}", "damaged"),
    ],
)
def test_a_file_that_is_not_safetensors_is_named(content: bytes, text: str, saved: Callable[..., Path]) -> None:
    folder = saved()
    (folder / SINGLE).write_bytes(content)
    message = refusal(folder)
    assert f"{folder / SINGLE} cannot be read" in message and text in message


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", r"only pickled ones \(pytorch_model.bin\).*use_safetensors=False"),
        ("other.safetensors", "it has other.safetensors, which transformers does not look for"),
        ("notes.txt", "neither model.safetensors nor"),
        ("adapter_config.json", "merge_and_unload"),
    ],
)
def test_a_folder_without_weights_says_what_to_do(file: str, message: str, saved: Callable[..., Path]) -> None:
    folder = saved()
    (folder / SINGLE).rename(folder / file)
    with pytest.raises(WeightsError, match=message):
        checkpoint.load(folder)


def test_quantised_weights_are_refused(saved: Callable[..., Path]) -> None:
    folder = saved()
    name = "model.layers.0.mlp.up_proj"
    whole = load_file(folder / SINGLE)
    for kind, dtype in (("I8", torch.int8), ("F8_E4M3", torch.float8_e4m3fn)):
        edit(folder, lambda t, dtype=dtype: whole | {f"{name}.weight": whole[f"{name}.weight"].to(dtype)})
        assert f"is quantised: 1 tensors of {kind}: {name}.weight" in refusal(folder)
        assert "model.dequantize()" in refusal(folder)
    edit(folder, lambda t: whole | {f"{name}.qweight": torch.zeros(2, dtype=torch.int32)})
    assert f"{name}.qweight" in refusal(folder)
    configure(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantization_config (gptq)" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite_are_named(dtype: torch.dtype, saved: Callable[..., Path]) -> None:
    from orchestrator import checkpoints

    folder = saved("llama", dtype=dtype)
    checkpoints.load_model(folder)
    name = "model.layers.1.self_attn.k_proj.weight"
    edit(folder, lambda t: t | {name: t[name].index_fill(0, torch.tensor(3), torch.nan)})
    with pytest.raises(WeightsError, match=f"nan or infinite numbers in {name} "):
        checkpoints.load_model(folder)
    with pytest.raises(WeightsError, match="nan or infinite"):
        LazyWeights(folder, checkpoint.load_config(folder)).one(name, torch.float32)


# ---- names of folders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./models/x", "/none/x", "../x", "a/b/c", "here/x", "x/", "~/x", "C:\\models\\x", ""])
def test_a_path_that_is_not_there_never_reaches_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.socket.connect", no_reading)
    monkeypatch.setattr("socket.getaddrinfo", no_reading)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint at .*(no folder of that name|the folder 'here' is here|no config)"
    ):
        checkpoint.load_config(name)


def test_a_hub_name_without_network_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    started = time.monotonic()
    for attempt in (checkpoint.load_config, checkpoint.load):
        with pytest.raises(
            CheckpointError, match=r"no checkpoint at 'nobody/nothing': .*hub name; .*the hub cannot be reached"
        ):
            attempt("nobody/nothing")
    assert time.monotonic() - started < 5


def test_files_and_folders_without_config_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the folder has no config.json"):
        checkpoint.load_config(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="it is a file; expected a folder"):
        checkpoint.load_config(tmp_path / "model.safetensors")


def test_more_kinds_of_layers_than_layers_are_refused_before_weights_are_looked_for(
    tiny_model: Any, tmp_path: Path
) -> None:
    folder = checkpoint.save(tiny_model("gemma3_text"), tmp_path / "model")
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps(fields | {"layer_types": [*fields["layer_types"], "full_attention", "full_attention"]}))
    (folder / "model.safetensors").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"config.json' cannot be used: .*layer_types.*"):
        checkpoint.load_config(folder)
