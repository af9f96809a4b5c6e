"""Checkpoints: round trips, the plain form without this project, atomic saves, clear refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from attention.checkpoint import Checkpoint
from attention.conversion.convert import convert
from attention.families import families
from attention.io import checkpoint, export
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan, LayerPlan, PlanError

UNIFORM = (LayerPlan((0, 1, 1, 0), (0, 1, 1, 0)),) * 2
UNEVEN = (LayerPlan((0, 0, 0, 1), (0, 0, 0, 1)), LayerPlan((0, 1, 1, 1), (0, 1, 1, 1)))
DECOUPLED = (LayerPlan((0, 1, 0, 2), (0, 0, 0, 0)), LayerPlan((0, 0, 0, 1), (0, 1, 2, 3)))
# Families whose stock form has a separate KV head count.
GROUPED = [n for n in sorted(families()) if families()[n].plain_config(families()[n].config_class(), 1) is not None]
# Their stock classes fix the width of a head, or norm over all heads: no zero heads can make up unequal groups.
NO_ZERO_HEADS = ("gemma4_text", "minimax_m2", "olmo2", "olmoe", "phi3", "stablelm")
UNGROUPED = sorted(set(families()) - set(GROUPED))


def each_with_one_of(names: list[str], kind: str) -> list[Any]:
    """Every family with a plan of this kind, and Llama with each; the others run in `make test-all`."""
    kinds = {"uniform": UNIFORM, "uneven": UNEVEN, "decoupled": DECOUPLED}
    return [
        pytest.param(name, layers, id=f"{name}-{own}", marks=[pytest.mark.extended] * (own != kind and name != "llama"))
        for name in names
        for own, layers in kinds.items()
    ]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(24)[None] % 64).logits


@pytest.mark.parametrize(("name", "layers"), each_with_one_of(sorted(families()), "decoupled"))
def test_round_trip(name: str, layers, tiny_model, tmp_path: Path) -> None:
    model = convert(tiny_model(name), AttentionPlan(layers, 8))
    back = checkpoint.load(checkpoint.save(model, tmp_path / "model", plain=False))
    assert torch.equal(logits(back), logits(model)) and plan_of(back) == plan_of(model)
    assert back.config.model_type == f"headfold_{name}"
    prompt = torch.arange(5)[None]
    written = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(back.generate(prompt, **written), model.generate(prompt, **written))  # decodes with its cache


@pytest.mark.parametrize("name", GROUPED)
def test_uniform_plan_is_saved_as_the_plain_family(name: str, tiny_model, tmp_path: Path) -> None:
    model = convert(tiny_model(name), AttentionPlan(UNIFORM, 8))
    folder = checkpoint.save(model, tmp_path / "model")
    stock = AutoModelForCausalLM.from_pretrained(folder)
    assert stock.config.model_type == name and stock.config.num_key_value_heads == 2
    assert torch.allclose(logits(stock), logits(model), atol=1e-4)
    note = json.loads((folder / checkpoint.PLAN_FILE).read_text())
    assert note["plan_digest"] == plan_of(model).digest


@pytest.mark.parametrize(("name", "layers"), each_with_one_of(GROUPED, "uneven"))
def test_export_to_stock_gqa_is_exact(name: str, layers, tiny_model, tmp_path: Path) -> None:
    model = convert(tiny_model(name), AttentionPlan(layers, 8))
    source = checkpoint.save(model, tmp_path / "model", plain=False)
    if name in NO_ZERO_HEADS and layers is not UNIFORM:
        with pytest.raises(ValueError, match=f"{name}.*equal groups"):
            export.export(source, "gqa", tmp_path / "stock", allow_larger_cache=True)
        return
    report = export.export(source, "gqa", tmp_path / "stock", allow_larger_cache=True)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert not stock.config.model_type.startswith("headfold")
    assert torch.allclose(logits(stock), logits(model), atol=1e-4)
    assert report.exact and report.kv_bytes_per_token_before == model.plan.kv_bytes_per_token("float32")
    cached = stock(torch.arange(9)[None], use_cache=True).past_key_values  # as many as the tiny models' windows
    assert sum(x.keys.nbytes + x.values.nbytes for x in cached.layers) == 9 * report.kv_bytes_per_token_after
    assert json.loads((tmp_path / "stock" / export.REPORT_FILE).read_text())["exact"] is True


@pytest.mark.parametrize("name", UNGROUPED)
def test_families_without_a_grouped_form(name: str, tiny_model, tmp_path: Path) -> None:
    """Only plain MHA goes back to the stock class; any other plan keeps the Headfold form and has no GQA export."""
    source = tiny_model(name)
    same = checkpoint.save(convert(source, AttentionPlan.identity(2, 4, 8)), tmp_path / "same")
    stock = AutoModelForCausalLM.from_pretrained(same)
    assert stock.config.model_type == name and torch.equal(logits(stock), logits(source))
    for index, layers in enumerate((UNIFORM, UNEVEN, DECOUPLED)):
        model = convert(source, AttentionPlan(layers, 8))
        folder = checkpoint.save(model, tmp_path / str(index))
        back = checkpoint.load(folder)
        assert back.config.model_type == f"headfold_{name}" and torch.equal(logits(back), logits(model))
        with pytest.raises(ValueError, match=f"{name} (family )?(has no stock GQA )?form"):
            export.export(folder, "gqa", tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", sorted(families()))
def test_tied_embeddings_survive_a_round_trip(name: str, tiny_model, tmp_path: Path) -> None:
    model = convert(tiny_model(name, tie_word_embeddings=True), AttentionPlan(DECOUPLED, 8))
    back = checkpoint.load(checkpoint.save(model, tmp_path / "model"))
    assert torch.equal(logits(back), logits(model))
    assert back.get_output_embeddings().weight is back.get_input_embeddings().weight


def test_llama_with_heads_that_do_not_divide_its_width_becomes_mistral(tiny_model, tmp_path: Path) -> None:
    layers = (LayerPlan((0, 0, 0, 1), (0, 0, 0, 1)),) * 2  # 2 groups of up to 3: 6 query heads, width 32
    source = checkpoint.save(convert(tiny_model("llama"), AttentionPlan(layers, 8)), tmp_path / "model")
    report = export.export(source, "gqa", tmp_path / "stock", allow_larger_cache=True)
    assert report.model_type == "mistral" and report.kv_bytes_per_token_after == report.kv_bytes_per_token_before
    biased = convert(tiny_model("llama", attention_bias=True), AttentionPlan(layers, 8))
    with pytest.raises(ValueError, match="equal groups"):
        export.export(checkpoint.save(biased, tmp_path / "biased"), "gqa", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_export_refuses_an_unknown_target(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="target must be one of.*'gqa'.*got 'onnx'"):
        export.export(tmp_path, "onnx", tmp_path / "out")


@pytest.mark.extended
def test_stock_transformers_alone_loads_it(tiny_model, tmp_path: Path) -> None:
    """In a process that cannot import this project, logits equal those of the model here."""
    model = convert(tiny_model("llama"), AttentionPlan(UNIFORM, 8))
    folder = checkpoint.save(model, tmp_path / "model")
    save_file({"logits": logits(model)}, tmp_path / "wanted.safetensors")
    code = f"""
import sys
sys.path = [p for p in sys.path if "site-packages" in p or "lib/python" in p]
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f)]
for name in ("attention", "search_spaces", "trainers", "orchestrator"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{{name}} can be imported")
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
wanted = load_file({str(tmp_path / "wanted.safetensors")!r})["logits"]
with torch.no_grad():
    got = model(torch.arange(24)[None] % 64).logits
print("difference", (got - wanted).abs().max().item())
"""
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert out.returncode == 0, out.stdout + out.stderr
    assert float(out.stdout.split()[-1]) < 1e-4


def test_a_second_copy_of_the_weights_is_neither_fetched_nor_hashed(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint.save(tiny_model("mistral"), tmp_path / "model")
    before = checkpoint.weights_digest(folder)
    shutil.copyfile(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert checkpoint.weights_digest(folder) == before
    repository = ["config.json", "headfold.json", "model.safetensors", "consolidated.safetensors"]
    repository += ["consolidated-00001-of-00002.safetensors", "original/model.safetensors"]

    def snapshot(_: str, *, allow_patterns: list[str], ignore_patterns: list[str], **__: Any) -> str:
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        assert [*filter_repo_objects(repository, **patterns)] == repository[:3]
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert Checkpoint("someone/mistral", checkpoint.load_config(folder)).folder == folder


def test_a_killed_save_leaves_the_old_checkpoint(tiny_model, tmp_path: Path) -> None:
    model = convert(tiny_model("llama"), AttentionPlan(DECOUPLED, 8))
    folder = checkpoint.save(model, tmp_path / "model")
    before = checkpoint.weights_digest(folder)
    report, tell = os.pipe()

    def write(fresh: Path) -> None:
        (fresh / "model.safetensors").write_bytes(b"half")
        os.write(tell, b"writing")
        time.sleep(60)

    if not (child := os.fork()):  # a new process would import for seconds
        try:
            checkpoint.write_atomically(folder, write)
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(report, 100) == b"writing"
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    os.close(report)
    assert list(folder.parent.glob(".model*")), "what it had begun"
    assert checkpoint.weights_digest(folder) == before
    assert torch.equal(logits(checkpoint.load(folder)), logits(model))


def test_a_save_killed_between_its_renames_is_recovered(tiny_model, tmp_path: Path) -> None:
    model = convert(tiny_model("llama"), AttentionPlan(DECOUPLED, 8))
    folder = checkpoint.save(model, tmp_path / "model")
    folder.rename(folder.with_name(".model.old"))  # what a kill between the two renames leaves
    assert torch.equal(logits(checkpoint.load(folder)), logits(model))


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    def write(fresh: Path) -> None:
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        checkpoint.write_atomically(tmp_path / "model", write)
    assert list(tmp_path.iterdir()) == []


def test_maps_that_disagree_with_the_config_are_refused(tiny_model, tmp_path: Path) -> None:
    folder = checkpoint.save(convert(tiny_model("llama"), AttentionPlan(DECOUPLED, 8)), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = next(k for k in weights if k.endswith("layers.0.self_attn.key_map"))
    weights[name] = torch.tensor([0, 1, 2, 0])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanError, match=r"layer 0: key_map in the weights is \(0, 1, 2, 0\)"):
        checkpoint.load(folder)


def test_missing_and_unsupported_checkpoints_are_refused(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="no checkpoint at .*nowhere"):
        checkpoint.load(tmp_path / "nowhere")
    assert time.monotonic() - start < 10
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ValueError, match="got 'mamba'"):
        checkpoint.load(tmp_path)


def test_pickled_weights_are_not_loaded(tiny_model, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no safetensors weights"):
        checkpoint.load(tmp_path)
