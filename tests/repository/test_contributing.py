"""CONTRIBUTING.md promises that adding a method is adding one file: its own example is taken at its word."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

USE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from attention.conversion.conversion import convert, read_layers
from attention.plan import AttentionPlan, LayerPlan

from search_spaces.recipes.recipes import recipe

config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=4, bos_token_id=None, eos_token_id=None)
torch.manual_seed(0)
model = LlamaForCausalLM(config)
with torch.no_grad():
    model.model.layers[0].self_attn.k_proj.weight[8:16] *= 3  # head 1
    model.model.layers[0].self_attn.v_proj.weight[24:32] *= 3  # head 3
plan = AttentionPlan((LayerPlan.from_groups([[0, 1], [2, 3]], [[0, 1], [2, 3]], 4),), head_dim=8)
new = convert(model, plan, fusion="strongest", fusion_settings={"norm_order": 3.0})
old, kept = read_layers(model)[0], read_layers(new)[0]
assert torch.equal(kept.k[0], old.k[1]) and torch.equal(kept.v[1], old.v[3]), "the strongest heads are not kept"
assert recipe("gqa", fusion="strongest").knobs("fusion") == {"norm_order": 2.0}
try:
    convert(model, plan, fusion="strongest", fusion_settings={"norm_order": 99.0})
except ValueError as error:
    print(error)
"""


def _example() -> tuple[str, str]:
    """The file name and the code of the example on the page."""
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    found = re.search(r"For example `([\w/]+\.py)`.*?```python\n(.*?)```", text, re.DOTALL)
    assert found, "CONTRIBUTING.md has no example"
    return found[1], found[2]


def _run(folder: Path) -> subprocess.CompletedProcess[str]:
    # The current folder comes first on the path, before the installed project.
    return subprocess.run([sys.executable, "-c", USE], cwd=folder, capture_output=True, text=True)


def test_example_is_one_file_and_works(tmp_path: Path) -> None:
    for package in ("attention", "search_spaces"):
        shutil.copytree(REPOSITORY / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    without = _run(tmp_path)
    assert without.returncode and "'strongest'" in without.stderr

    name, code = _example()
    (tmp_path / name).write_text(code)
    done = _run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "norm_order must lie in [1.0, 8.0], got 99.0" in done.stdout


def test_example_is_in_style(tmp_path: Path) -> None:
    name, code = _example()
    file = tmp_path / Path(name).name
    file.write_text(code)
    ruff = Path(sys.executable).parent / "ruff"
    config = ["--config", str(REPOSITORY / "pyproject.toml")]
    done = subprocess.run([ruff, "check", *config, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
