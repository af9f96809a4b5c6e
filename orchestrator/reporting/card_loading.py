"""The code of a model card that loads the model in each engine, to be copied as it is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from attention.cache_formats import LLAMA_CPP, VLLM, CachePair
from attention.checkpoint import Checkpoint
from attention.io.stock_form import exact_targets, export_command
from attention.io.targets import targets, vllm
from attention.modeling.model_classes import TYPE_PREFIX
from orchestrator.storage.json_files import read_if_there

_GENERATE = """\
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=32)[0]))"""
_TRANSFORMERS = (
    """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model_path = "{path}"{hint}
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto"{trust})
"""
    + _GENERATE
)
_HEADFOLD = (
    """\
# in an environment with Headfold: `pip install .` in a checkout of it
from attention.io import checkpoint
from transformers import AutoTokenizer

model_path = "{path}"{hint}
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = checkpoint.load(model_path)
"""
    + _GENERATE
)
_GGUF = """\
python convert_hf_to_gguf.py {folder} --outfile model.gguf   # of llama.cpp
llama-server -m model.gguf"""
_EXPORTED_GGUF = """\
{command}   # in an environment with Headfold
llama-server -m {file}"""


class CodeBlock(NamedTuple):
    """A block of a card."""

    engine: str
    language: str
    lines: str


def loading_blocks(
    folder: Path,
    repository: str | None,
    engines: Sequence[str],
    cache_format: str | None = None,
    tensor_parallel: int | None = None,
    name: str = "model",
) -> list[CodeBlock]:
    """Return the code that loads the files in `folder`, for each engine.

    Args:
        folder: Of the checkpoint.
        repository: Its future repository on the hub; None: the reader of the card inserts a path.
        engines: Software that loads the files.
        cache_format: That of the KV cache (`attention.cache_formats`).
        tensor_parallel: Number of GPUs that vLLM divides the heads among.
        name: That of the folder, for its reader.
    """
    pair = None if cache_format is None else CachePair.parse(cache_format)
    flags = {name: f" {pair.flags(name)}" for name in pair.engines} if pair else {}
    if tensor_parallel is not None:
        flags[VLLM] = f"{flags.get(VLLM, '')} --tensor-parallel-size {tensor_parallel}"
    local = f"path/to/{name}"
    path = repository or local
    hint = "" if repository else "  # the folder of this card"
    download = f"hf download {repository} --local-dir model\n" if repository else ""
    downloaded = "model" if repository else local
    if gguf := next(iter(sorted(folder.glob("*.gguf"))), None):
        served = flags.get(LLAMA_CPP, "")
        lines = f"llama-server -m {gguf.name}{served}"
        if repository:
            lines = f"llama-server --hf-repo {repository} --hf-file {gguf.name}{served}\n{lines}"
        return [CodeBlock("llama.cpp", "bash", lines)]
    config = read_if_there(folder / "config.json")
    if str(config.get("model_type", "")).startswith(TYPE_PREFIX):
        blocks = [CodeBlock("Headfold", "python", _HEADFOLD.format(path=path, hint=hint))]
        opened = Checkpoint.open(folder)
        # Without a larger cache than that of the plan
        exact = exact_targets(opened.config, opened.plan, opened.config.dtype or "float32")
        for name in exact:
            engines = targets()[name].engines_of(opened.config, opened.plan)
            title = f"{' and '.join(engines)}, after an export"
            command = export_command(downloaded, name)
            blocks.append(CodeBlock(title, "bash", f"{download}{command}"))
        return blocks
    own_code = "auto_map" in config
    blocks = []
    for engine in engines:
        if engine == "transformers":
            trust = ", trust_remote_code=True" if own_code else ""
            lines = _TRANSFORMERS.format(path=path, hint=hint, trust=trust)
            blocks.append(CodeBlock(engine, "python", lines))
        elif engine == "vLLM":
            trusting = vllm.BACKEND if "per_layer_config" in config else vllm.TRUSTING
            options = trusting if own_code else ""
            lines = f"vllm serve {path}{options}{flags.get(VLLM, '')}"
            blocks.append(CodeBlock(engine, "bash", lines))
        elif engine == "llama.cpp" and not own_code:
            lines = _GGUF.format(folder=downloaded)
            if _is_misread(config):
                command = export_command(downloaded, "gguf")
                file = shlex.quote(f"{downloaded}-gguf/model.gguf")
                lines = _EXPORTED_GGUF.format(command=command, file=file)
            blocks.append(CodeBlock(engine, "bash", download + lines + flags.get(LLAMA_CPP, "")))
    return blocks


def _is_misread(config: Mapping[str, Any]) -> bool:
    """Return whether llama.cpp's script writes a file that computes something else, unreported.

    It passes over the rotary frequencies of wide heads (`attention.io.wide_form`), and over the
    head dim of a Qwen2.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        return True
    width, heads, head_dim = (
        config.get(name) or 0 for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    return config.get("model_type") == "qwen2" and head_dim > 0 and heads * head_dim != width
