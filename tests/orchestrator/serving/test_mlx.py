"""A DeciLM folder in mlx-lm: the source's logits, with each layer's own number of KV heads.

mlx-lm needs a separate environment, on a Mac or on Linux: `pip install mlx-lm 'mlx[cpu]'`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_plans import converted, together
from head_references import logits
from transformers import PreTrainedModel

from attention.io import checkpoint
from attention.io.export import export
from attention.io.targets.vllm import ffn_width
from attention.plan import AttentionPlan

Tiny = Callable[..., PreTrainedModel]
VARIABLE = "HEADFOLD_MLX_PYTHON"
PYTHON = os.environ.get(VARIABLE)
PLAN = AttentionPlan(together((0, 1, 1, 0), (0, 0, 0, 0)), 8)
RUN = """
import json, sys
from pathlib import Path
import mlx.core as mx
from mlx_lm.utils import load_model
model, _ = load_model(Path(sys.argv[1]))
counts = [layer.self_attn.n_kv_heads for layer in model.model.layers]
print(json.dumps([counts, model(mx.array(json.loads(sys.argv[2]))).tolist()]))
"""


def blocks(folder: Path) -> list[dict[str, dict[str, float]]]:
    return json.loads((folder / "config.json").read_text())["block_configs"]


@pytest.mark.parametrize(
    ("width", "hidden"),
    # Llama 3.1 8B and Mistral 7B, Llama 3.2 1B and 3B, 70B; Llama 2 7B; Qwen2.5 7B
    [(14336, 4096), (8192, 2048), (8192, 3072), (28672, 8192), (11008, 4096), (18944, 3584)],
)
def test_the_width_of_published_models_is_exact_as_ffn_mult(width: int, hidden: int) -> None:
    (mult,) = ffn_width(SimpleNamespace(intermediate_size=width, hidden_size=hidden)).values()
    least = int(2 * mult * hidden / 3)  # as vLLM's nemotron_nas, SGLang and mlx-lm compute it
    assert least + (-least % 256) == width and mult == round(mult, 6)


def test_a_width_that_ffn_mult_cannot_say_is_written_itself(tiny_model: Tiny, tmp_path: Path) -> None:
    for width, name in ((48, "intermediate_size"), (256, "ffn_mult")):
        model = converted(tiny_model("llama", intermediate_size=width), PLAN)
        export(checkpoint.save(model, tmp_path / f"source-{width}"), "vllm", tmp_path / f"out-{width}")
        assert all(
            set(block["ffn"]) == {"no_op", "replace_with_linear", name} for block in blocks(tmp_path / f"out-{width}")
        )


@pytest.mark.extended
@pytest.mark.skipif(PYTHON is None, reason=f"mlx-lm needs an environment of its own: {VARIABLE}=PYTHON")
def test_mlx_lm_computes_what_the_source_does(tiny_model: Tiny, tmp_path: Path) -> None:
    model = converted(tiny_model("llama", intermediate_size=256), PLAN)
    export(checkpoint.save(model, tmp_path / "source"), "vllm", tmp_path / "out")
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(0))
    command = [str(PYTHON), "-c", RUN, str(tmp_path / "out"), json.dumps(ids.tolist())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    counts, computed = json.loads(done.stdout.splitlines()[-1])
    assert counts == [2, 1]
    torch.testing.assert_close(torch.tensor(computed), logits(model, ids), rtol=0, atol=1e-4)
