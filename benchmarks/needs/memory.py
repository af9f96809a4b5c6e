"""Peak memory of a conversion layer by layer against what `estimate` says beforehand.

    python -m benchmarks memory [--quick]

The random checkpoint is written shard by shard and the conversion runs in a separate process, so
this process never loads the model either.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PretrainedConfig

from attention.io.layers.windows import empty, layer_prefix, of_layer, outer_names, window_config
from attention.io.shards import shard_path, write_index, write_shard
from benchmarks.models import llama
from benchmarks.report import Row, Scale, benchmark

DEMO = Path(__file__).resolve().parents[2] / "examples" / "stdlib-llama"
# TinyLlama's shape with one KV head a query head, so that there is something to convert; 19 layers are 1.1B parameters.
WIDE = {"num_attention_heads": 32, "head_dim": 64, "intermediate_size": 5632, "vocab_size": 32_000}
NARROW = {"num_attention_heads": 8, "head_dim": 64, "intermediate_size": 1408, "vocab_size": 4096}
GIGA = 2.0**30


@torch.no_grad()
def random_checkpoint(
    config: PretrainedConfig, folder: Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> int:
    """Write a random checkpoint with the demo's tokenizer, one layer in memory at a time. Returns its parameters.

    `device`: where the numbers are drawn; billions take minutes on a CPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(0)
    cpu = torch.device("cpu")

    def filled(like: torch.Tensor) -> torch.Tensor:
        if like.dim() == 1:
            return torch.ones_like(like)
        values = torch.randn(like.shape, generator=generator, dtype=torch.float32, device=device)
        return values.div_(math.sqrt(like.shape[-1])).to(like.device, like.dtype)

    for layer in range(config.num_hidden_layers):
        window = empty(window_config(config, layer, 1), dtype, cpu)
        prefix = layer_prefix(window)
        tensors = {n: t for n, t in window.state_dict().items() if n.startswith(prefix)}
        layers = {of_layer(name, prefix, layer): filled(tensor) for name, tensor in tensors.items()}
        write_shard(shard_path(folder, layer + 1, config.num_hidden_layers), layers)
    whole = empty(window_config(config, 0, config.vocab_size), dtype, cpu)
    table, *others = outer_names(whole)
    state = whole.state_dict()
    names = [n for n in others if not (config.tie_word_embeddings and n == "lm_head.weight")]
    write_shard(shard_path(folder, 0, config.num_hidden_layers), {table: filled(state[table])})
    rest = {name: filled(state[name]) for name in names}
    write_shard(shard_path(folder, config.num_hidden_layers + 1, config.num_hidden_layers), rest)
    config.architectures, config.dtype = [type(whole).__name__], dtype
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return write_index(folder)["parameters"]


VERBS = """
import json, sys
from orchestrator import main
for arguments in json.loads(sys.argv[1]):
    try:
        main.run(arguments)
    except SystemExit as exit:
        if exit.code:
            raise
"""


def verbs(*calls: Sequence[str]) -> None:
    """Run verbs one after the other in a separate process. Raises CalledProcessError if one fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", VERBS, json.dumps(calls)]
    subprocess.run(command, check=True, env=environment, cwd=DEMO.parents[1], stdout=subprocess.DEVNULL)


def measured(
    config: PretrainedConfig, folder: Path, *options: str, recipe: str = "headfold_gqa"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The estimate of a conversion layer by layer of a random checkpoint, made before it, and the conversion's
    record."""
    random_checkpoint(config, folder / "model")
    same = ("--model", str(folder / "model"), "--recipe", recipe, "--kv-ratio", "0.25", "--dtype", "bfloat16")
    estimate, done = folder / "estimate.json", folder / "convert.json"
    verbs(
        ["estimate", *same, *options, "--json", str(estimate)],
        ["convert", *same, *options, "--layerwise", "--out", str(folder / "out"), "--json", str(done)],
    )
    return json.loads(estimate.read_text(encoding="utf-8")), json.loads(done.read_text(encoding="utf-8"))


@benchmark("memory", devices=("cpu",))
def memory(scale: Scale) -> Iterator[Row]:
    """Peak resident memory of a conversion layer by layer against the estimate made before it."""
    sizes = ["--calibration-tokens", "1024", "--eval-tokens", "512", "--sequence-length", "256"]
    # A few steps take as much memory as many. Neighbours cost no time to group; merging takes the
    # most memory.
    sizes += ["--set", "refinement.fit_steps=2"]
    for layers, grouping in ((scale.pick(2, 19), "neighbour"), (scale.pick(1, 2), "merge")):
        config = llama(layers, scale.pick(NARROW, WIDE), tie_word_embeddings=False)
        with tempfile.TemporaryDirectory() as folder:
            estimate, done = measured(config, Path(folder), *sizes, "--set", f"grouping={grouping}")
        about = f"{estimate['parameters'] / 1e9:.2f}B parameters, {layers} layers, bfloat16, grouping={grouping}"
        peak, spent = done["peak_memory"] / GIGA, sum(done["seconds"].values())
        yield Row(f"{layers} layers, measured and estimated", peak, estimate["layerwise"] / GIGA, "GiB", about)
        yield Row(f"{layers} layers, against all in memory (estimated)", peak, estimate["resident"] / GIGA, "GiB")
        yield Row(f"{layers} layers, time", spent, None, "s", "fit of 2 steps per layer, heal, 1,024 tokens")
