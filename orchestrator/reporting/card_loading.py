"""The lines of a model card that load it, engine by engine, to be copied as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attention.modeling.modeling import PREFIX
from orchestrator.storage.records import read_json

TRANSFORMERS = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{place}")
model = AutoModelForCausalLM.from_pretrained("{place}", dtype="auto"{trust})
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=32)[0]))"""
HEADFOLD = """\
from attention.io import checkpoint  # of Headfold

model = checkpoint.load("{place}")"""
TO_GGUF = """\
python convert_hf_to_gguf.py {folder} --outfile model.gguf   # of llama.cpp
llama-server -m model.gguf"""

Lines = tuple[str, str, str]
"""Engine, language of the code block, lines."""


def loading_lines(folder: Path, place: str, engines: Sequence[str]) -> list[Lines]:
    """For each engine that loads the files in `folder`, which will be reached as `place` (name on the hub, or path)."""
    if gguf := next(iter(sorted(folder.glob("*.gguf"))), None):
        return [("llama.cpp", "bash", _gguf(place, gguf.name))]
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if str(config.get("model_type", "")).startswith(PREFIX):
        return [("Headfold", "python", HEADFOLD.format(place=place))]
    own_code = "auto_map" in config
    made: list[Lines] = []
    for engine in engines:
        if engine == "transformers":
            trust = ", trust_remote_code=True" if own_code else ""
            made.append((engine, "python", TRANSFORMERS.format(place=place, trust=trust)))
        elif engine == "vLLM":
            made.append((engine, "bash", f"vllm serve {place}" + " --trust-remote-code" * own_code))
        elif engine == "llama.cpp" and not own_code:
            fetched = f"hf download {place} --local-dir model\n" if "/" in place else ""
            made.append((engine, "bash", fetched + TO_GGUF.format(folder="model" if fetched else place)))
    return made


def _gguf(place: str, file: str) -> str:
    """A repository on the hub is fetched by llama.cpp itself; else the file is named."""
    fetched = f"llama-server --hf-repo {place} --hf-file {file}\n" if "/" in place else ""
    return fetched + f"llama-server -m {file}"
