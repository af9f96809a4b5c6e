"""Which engines serve a model that was promoted, what each keeps of a token, and the commands that start it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from attention.base.messages import cut
from attention.checkpoint import Checkpoint
from attention.io.export import LargerCacheError, cache_dtype, check_cache
from attention.io.stock_form import format_of
from attention.io.targets import TargetError, target
from orchestrator.storage.json_files import read_json

TARGETS = {"vLLM": "vllm", "llama.cpp": "gguf", "transformers": "transformers"}
"""Engines, and the target that each reads where the folder itself is none."""
Way = dict[str, Any]


def ways_to_serve(model: str | Path, served: str | Path | None = None) -> list[Way]:
    """For each engine `{engine, target, kv_bytes_per_token, commands}` (of transformers: the line of
    Python that loads it), or `{engine, why_not}` of one that cannot hold
    the plan in its own bytes. `model`: what the gate of a promotion has written; `served`: the same model, exported for
    the engine that the search was for. Empty if the folder is no longer there. Reads no weights."""
    model = Path(model)
    if not (model / "config.json").is_file():
        return []
    opened = Checkpoint.open(model)
    config, plan = opened.config, opened.plan
    dtype = cache_dtype(str(opened.stored_dtype).removeprefix("torch."))
    loads, ready = format_of(model, dtype)["loads_in"], _written(served)
    ways = []
    for engine, name in TARGETS.items():
        folder, exported = model, engine in loads and engine != "llama.cpp"  # which reads its own files only
        if ready is not None and ready[0] == engine:
            folder, exported = ready[1], True
        try:
            held = target("gqa" if exported and engine == "transformers" else name).held(config, plan)
            check_cache(plan, held, name, dtype)
        except (TargetError, LargerCacheError) as error:
            ways.append({"engine": engine, "why_not": cut(str(error))})
            continue
        commands = []
        if not exported:
            folder = model.parent / name
            commands.append(f"headfold export {_quoted(model)} --target {name} --out {_quoted(folder)}")
        own_code = name == "vllm" and folder != model and len(set(held.key_heads)) > 1  # DeciLM
        commands.append(_start(engine, folder, own_code, stock=folder == model))
        way = {"engine": engine, "target": None if exported else name, "commands": commands}
        ways.append(way | {"kv_bytes_per_token": held.bytes_per_token(dtype)})
    return ways


def _written(served: str | Path | None) -> tuple[str, Path] | None:
    """The engine that a folder was exported for, and the folder."""
    if served is None or not (report := Path(served) / "export.json").is_file():
        return None
    engines = {name: engine for engine, name in TARGETS.items()}
    name = read_json(report).get("target")
    return (engines[name], Path(served)) if name in engines else None


def _start(engine: str, folder: Path, own_code: bool, stock: bool) -> str:
    if engine == "vLLM":
        return f"vllm serve {_quoted(folder)}" + " --trust-remote-code" * own_code
    if engine == "llama.cpp":
        return f"llama-server -m {_quoted(folder / 'model.gguf')}"
    trusted = "" if stock else ", trust_remote_code=True"
    return f'AutoModelForCausalLM.from_pretrained("{folder}", dtype="auto"{trusted})'


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
