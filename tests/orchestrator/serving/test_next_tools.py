"""Common tools run on an export, one after the other: a stock folder, and one with different counts per layer.

PEFT is installed here. TRL and llm-compressor need separate environments (docs/reference/engines.md), and are skipped
without them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_plans import together
from safetensors.torch import load_file
from transformers import PreTrainedModel

from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.io.export import export
from attention.plan import AttentionPlan

TRL, COMPRESSOR = "HEADFOLD_TRL_PYTHON", "HEADFOLD_COMPRESSOR_PYTHON"
FOUR, TWO, ONE = ((0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 0, 0, 1, 1, 1, 1), (0,) * 8)
COUNTS = {"gqa": [4, 4, 4, 4], "per_layer": [4, 2, 1, 4]}
PLANS = {"gqa": together(FOUR, FOUR, FOUR, FOUR), "per_layer": together(FOUR, TWO, ONE, FOUR)}
LINES = [f"def read_lines_{number}(path):\n    return path.read_text().splitlines()\n" for number in range(8)]

START = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, out, lines = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
heads = lambda model: [layer.self_attn.k_proj.weight.shape[0] // 32 for layer in model.model.layers]
"""
PEFT_RUN = """
from peft import LoraConfig, get_peft_model
ids = tokenizer(lines[0], return_tensors="pt")["input_ids"]
tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM"))
optimiser = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
losses = []
for _ in range(3):
    loss = tuned(input_ids=ids, labels=ids).loss
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    losses.append(loss.item())
widths = [layer.self_attn.k_proj.lora_B["default"].weight.shape[0] // 32 for layer in model.model.layers]
merged = tuned.merge_and_unload()
merged.save_pretrained(out)
tokenizer.save_pretrained(out)
again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32)
with torch.no_grad():
    apart = (again(ids).logits - merged(ids).logits).abs().max().item()
print(json.dumps({"losses": losses, "widths": widths, "heads": heads(again), "apart": apart}))
"""
TRL_RUN = """
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
before = {name: weight.clone() for name, weight in model.named_parameters()}
settings = SFTConfig(output_dir=out, max_steps=1, per_device_train_batch_size=2, learning_rate=1e-3, max_length=64,
                     report_to=[], use_cpu=True, save_strategy="no", logging_steps=1, bf16=False)
trainer = SFTTrainer(model=model, args=settings, train_dataset=Dataset.from_dict({"text": lines}),
                     processing_class=tokenizer)
trainer.train()
trainer.save_model(out)
changed = [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32)
ids = tokenizer(lines[0], return_tensors="pt")["input_ids"]
with torch.no_grad():
    apart = (again(ids).logits - model.eval()(ids).logits).abs().max().item()
loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
print(json.dumps({"loss": loss, "changed": changed, "heads": heads(again), "apart": apart}))
"""
COMPRESSOR_RUN = """
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
if getattr(model.config, "per_layer_config", None):  # one scale per layer depends on no head count
    model.config.allow_global_per_layer_attribute_access = True
eight = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
recipe = QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"], kv_cache_scheme=eight)
oneshot(model=model, recipe=recipe, dataset=Dataset.from_dict({"text": lines}), processor=tokenizer,
        max_seq_length=64, num_calibration_samples=len(lines), output_dir=out)
print(json.dumps({"heads": heads(model)}))
"""


@pytest.fixture(scope="module", params=list(PLANS))
def exported(
    request: pytest.FixtureRequest, demo_model: PreTrainedModel, demo_dir: Path, tmp_path_factory: Any
) -> tuple[str, Path]:
    """The name of a target, and the demo checkpoint with fewer KV heads as it writes it."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    checkpoint.save(convert(demo_model, AttentionPlan(PLANS[name], 32)), folder / "source", demo_dir)
    export(folder / "source", name, folder / "out", folder / "source")
    return name, folder / "out"


def run(python: str, script: str, folder: Path, out: Path) -> dict[str, Any]:
    """Run START and a script in an environment; return its last line."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(out.parent / "modules"), "PYTHONPATH": ""}
    command = [python, "-c", START + script, str(folder), str(out), json.dumps(LINES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out.parent, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def environment(variable: str) -> str:
    """The Python of a tool's environment; skips without one."""
    if (python := os.environ.get(variable)) is None:
        pytest.skip(f"it needs an environment of its own: {variable}=PYTHON")
    return python


@pytest.mark.extended
def test_peft_trains_adapters_and_merges_them(exported: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = exported
    result = run(sys.executable, PEFT_RUN, folder, tmp_path / "merged")
    assert result["losses"][-1] < result["losses"][0]
    assert result["widths"] == result["heads"] == COUNTS[name]
    assert result["apart"] < 1e-4


@pytest.mark.extended
def test_trl_takes_a_step_of_supervised_training(exported: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = exported
    result = run(environment(TRL), TRL_RUN, folder, tmp_path / "trained")
    assert 0 < result["loss"] < 20 and result["heads"] == COUNTS[name] and result["apart"] < 1e-4
    assert {f"model.layers.{layer}.self_attn.k_proj.weight" for layer in range(4)} <= set(result["changed"])


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_llm_compressor_quantises_weights_and_cache(strategy: str, exported: tuple[str, Path], tmp_path: Path) -> None:
    """With one scale per layer, or one for each of the remaining KV heads."""
    name, folder = exported
    if (name, strategy) == ("per_layer", "attn_head"):
        pytest.skip("compressed-tensors reads one number of KV heads for all layers")
    script = COMPRESSOR_RUN.replace('"tensor"', f'"{strategy}"')
    result = run(environment(COMPRESSOR), script, folder, tmp_path / "fp8")
    assert result["heads"] == COUNTS[name]
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["strategy"] == strategy
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    for layer, count in enumerate(COUNTS[name]):
        projection = f"model.layers.{layer}.self_attn."
        assert tensors[f"{projection}k_proj.weight"].shape[0] == 32 * count
        scales = count if strategy == "attn_head" else 1
        assert {tensors[f"{projection}{side}_scale"].numel() for side in "kv"} == {scales}
