"""Written checkpoints, read by transformers 4.57 in a separate environment: the same logits, the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from attention.conversion.convert import convert
from attention.io import checkpoint, export
from attention.io.precision import own_dtype
from attention.plan import AttentionPlan, LayerPlan

pytestmark = [pytest.mark.slow, pytest.mark.extended]

OLDER = ("transformers==4.57.*", "huggingface_hub>=0.34,<1", "tokenizers>=0.22,<=0.23.0")
UNIFORM = AttentionPlan((LayerPlan((0, 1, 1, 0), (0, 1, 1, 0)),) * 2, 8)
LOPSIDED = AttentionPlan((LayerPlan((0, 0, 0, 1), (0, 0, 0, 1)),) * 2, 8)
APART = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)),) * 2, 8)
LAYERED = AttentionPlan((LayerPlan((0, 1, 1, 0), (0, 1, 1, 0)), LayerPlan((0, 0, 0, 0), (0, 0, 0, 0))), 8)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
TEXT = "def read_lines(path):\n    return open(path).read().splitlines()  # é\n"
READ = """
import json, sys
import torch, transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

assert transformers.__version__.startswith("4.57"), transformers.__version__
folders, tokens, text, out = sys.argv[1].split(":"), *sys.argv[2:]
found, ids = {}, {}
for index, folder in enumerate(folders):
    with open(folder + "/config.json") as file:
        fields = json.load(file)
    code = {"trust_remote_code": "auto_map" in fields}
    if fields["model_type"] == "nemotron-nas":  # of which the folder has the configuration alone
        config = AutoConfig.from_pretrained(folder, **code)
        assert config.rope_scaling["rope_type"] == "llama3" and config.rope_theta == 500_000, config
        ids[folder] = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
        continue
    model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **code)
    assert not any(told.values()), (folder, told)
    with torch.no_grad():
        found[str(index)] = model.eval()(load_file(tokens)["tokens"]).logits
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **code).dtype
    ids[folder] = [str(stored), AutoTokenizer.from_pretrained(folder)(text)["input_ids"]]
save_file(found, out)
print(json.dumps(ids))
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that imports transformers 4.57 and everything else as here."""
    target = tmp_path_factory.mktemp("older")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--target", str(target), *OLDER], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"transformers 4.57 cannot be installed: {done.stderr}"
    return os.environ | {"PYTHONPATH": str(target), "HF_HUB_OFFLINE": "1"}


def lowered(model: PreTrainedModel, folder: Path, demo: Path, target: str | None = None) -> Path:
    """As `convert` writes a model; with a target as `export` does."""
    saved = checkpoint.save(model, folder / "made" if target else folder, demo)
    if target:
        export.export(saved, target, folder / "out", demo)
    return folder / "out" if target else saved


def test_transformers_4_reads_what_we_write(
    older: dict[str, str], tiny_model: Callable[..., PreTrainedModel], demo_dir: Path, tmp_path: Path
) -> None:
    llama3: dict[str, Any] = {"vocab_size": 2048, "rope_parameters": LLAMA3, "num_key_value_heads": 4}
    grouped = llama3 | {"num_key_value_heads": 2}
    models = {
        "converted": (convert(tiny_model("llama", **llama3), UNIFORM), None),
        "tied": (convert(tiny_model("llama", tie_word_embeddings=True, **llama3), UNIFORM), "gqa"),
        "original": (tiny_model("llama", tie_word_embeddings=True, dtype=torch.bfloat16, **grouped), "gqa"),
        "as mistral": (convert(tiny_model("llama", **llama3), LOPSIDED), "gqa"),
        "qwen2": (convert(tiny_model("qwen2", vocab_size=2048, rope_theta=1e6), UNIFORM), "gqa"),
        "gemma": (convert(tiny_model("gemma", vocab_size=2048, rope_theta=5e4), UNIFORM), "gqa"),
        "gpt_neox": (tiny_model("gpt_neox", vocab_size=2048, rotary_pct=0.25, rotary_emb_base=500), None),
        "as phi": (convert(tiny_model("gpt_neox", vocab_size=2048, rotary_emb_base=500), UNIFORM), "phi"),
    }
    folders = [lowered(model, tmp_path / name, demo_dir, target) for name, (model, target) in models.items()]
    folders.append(demo_dir)
    folders.append(lowered(convert(tiny_model("llama", **llama3), APART), tmp_path / "maps", demo_dir, "transformers"))
    deci = lowered(convert(tiny_model("llama", **llama3), LAYERED), tmp_path / "deci", demo_dir, "vllm")
    tokens = torch.randint(0, 2048, (2, 40), generator=torch.Generator().manual_seed(0))
    result, ids = read_with(older, [*folders, deci], tokens, tmp_path)
    wanted_ids = AutoTokenizer.from_pretrained(demo_dir)(TEXT)["input_ids"]
    assert ids[str(deci)] == wanted_ids
    for folder, logits in zip(folders, result, strict=True):
        code = (folder / "modeling_head_maps.py").is_file()
        created = folder.parent / "made" if code else folder
        ours = checkpoint.load(created, torch.float32)
        with torch.no_grad():
            difference = (ours(tokens).logits - logits).abs().max().item()
        assert difference < 1e-4 * max(1.0, logits.abs().max().item()), folder
        assert ids[str(folder)] == [str(own_dtype(checkpoint.load_config(created), created)), wanted_ids]


def read_with(
    older: dict[str, str], folders: list[Path], tokens: Tensor, scratch: Path
) -> tuple[list[Tensor], dict[str, Any]]:
    """Logits of each folder, and its dtype and the ids of TEXT, as the other environment has them."""
    from safetensors.torch import save_file

    save_file({"tokens": tokens}, scratch / "tokens.safetensors")
    report = [
        ":".join(map(str, folders)),
        str(scratch / "tokens.safetensors"),
        TEXT,
        str(scratch / "logits.safetensors"),
    ]
    command = [sys.executable, "-P", "-c", READ, *report]
    done = subprocess.run(command, env=older, cwd=scratch, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    logits = load_file(scratch / "logits.safetensors")
    return [logits[str(index)] for index in range(len(folders)) if str(index) in logits], json.loads(
        done.stdout.splitlines()[-1]
    )
