"""The lines of a model card that load it, engine by engine, to be copied as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attention.checkpoint import Checkpoint
from attention.io.stock_form import exact_targets, export_command
from attention.io.targets import targets
from attention.modeling.model_classes import TYPE_PREFIX
from orchestrator.storage.json_files import read_json

GENERATE = """\
prompt = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=32)[0]))"""
TRANSFORMERS = (
    """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model_path = "{place}"{hint}
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto"{trust})
"""
    + GENERATE
)
HEADFOLD = (
    """\
# in an environment with Headfold: `pip install .` in a checkout of it
from attention.io import checkpoint
from transformers import AutoTokenizer

model_path = "{place}"{hint}
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = checkpoint.load(model_path)
"""
    + GENERATE
)
HERE = "  # the folder of this card"
TO_GGUF = """\
python convert_hf_to_gguf.py {folder} --outfile model.gguf   # of llama.cpp
llama-server -m model.gguf"""

Lines = tuple[str, str, str]
"""Engine, language of the code block, lines."""


def loading_lines(folder: Path, repository: str | None, engines: Sequence[str]) -> list[Lines]:
    """For each engine that loads the files in `folder`, which will be reached by a name on the hub, or by a path that
    whoever reads the card puts in."""
    local = f"path/to/{folder.resolve().name}"
    named = {"place": repository or local, "hint": "" if repository else HERE}
    fetched = f"hf download {repository} --local-dir model\n" if repository else ""
    there = "model" if fetched else local
    if gguf := next(iter(sorted(folder.glob("*.gguf"))), None):
        direct = f"llama-server --hf-repo {repository} --hf-file {gguf.name}\n" if repository else ""
        return [("llama.cpp", "bash", f"{direct}llama-server -m {gguf.name}")]
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if str(config.get("model_type", "")).startswith(TYPE_PREFIX):
        exports = [
            (
                f"{' and '.join(targets()[name].engines)}, after an export",
                "bash",
                f"{fetched}{export_command(there, name)}",
            )
            for name in _exact(folder)
        ]
        return [("Headfold", "python", HEADFOLD.format(**named)), *exports]
    own_code = "auto_map" in config
    made: list[Lines] = []
    for engine in engines:
        if engine == "transformers":
            trust = ", trust_remote_code=True" if own_code else ""
            made.append((engine, "python", TRANSFORMERS.format(**named, trust=trust)))
        elif engine == "vLLM":
            made.append((engine, "bash", f"vllm serve {named['place']}" + " --trust-remote-code" * own_code))
        elif engine == "llama.cpp" and not own_code:
            made.append((engine, "bash", fetched + TO_GGUF.format(folder=there)))
    return made


def _exact(folder: Path) -> list[str]:
    """The targets that hold a model in our own format at no more cache than its plan takes."""
    opened = Checkpoint.open(folder)
    return list(exact_targets(opened.config, opened.plan, opened.config.dtype or "float32"))
