"""Every folder that Headfold writes, opened by a Python that knows transformers and nothing of Headfold.

Families, formats and kinds of rotary embedding are those that the packages find: a new one is tested as soon as it is
there. One process opens all folders, since it takes longer to start than to open one.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_plans import converted, plans
from gguf import GGUFReader
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from attention.families import families, geometry_of
from attention.io import checkpoint
from attention.io.export import probe
from attention.io.targets import Lowered, TargetError, targets
from attention.modeling.model_classes import TYPE_PREFIX, plan_of

Tiny = Callable[..., PreTrainedModel]
PLANS = plans(8)
TEXT = "def read_lines(path):\n    return open(path).read().splitlines()  # é\n"
THETA = 50_000.0
ALL = ("stock", "headfold", *sorted(targets()))
GGUF_READ = ("llama", "qwen2", "qwen3", "gpt2")
"""Architectures of GGUF whose tokenizer transformers reads."""
TIED = {name: {"tie_word_embeddings": True} for name in ("gemma", "qwen3")}  # as llama.cpp requires
READ = """
import json, sys
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

def attempt(function):
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

with open(sys.argv[1]) as file:
    asked, text, tokens = json.load(file)
found, logits, tokens = {}, {}, torch.tensor(tokens)

def compute(folder, trust):
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=trust, output_loading_info=True
    )
    model, info = loaded
    if any(info.values()):
        return f"LoadingError: {info}"
    with torch.no_grad():
        logits[f"{folder}|{trust}"] = model.eval()(tokens).logits
    return "loaded"

def tokenize(folder, trust, more):
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust, **more)(text)["input_ids"]

for folder, (parts, more) in asked.items():
    for trust in (False, True):
        opening = {
            "config": lambda: AutoConfig.from_pretrained(folder, trust_remote_code=trust).model_type,
            "tokenizer": lambda: tokenize(folder, trust, more),
            "model": lambda: compute(folder, trust),
        }
        found[f"{folder}|{trust}"] = {part: attempt(opening[part]) for part in parts[str(trust)]}
ours = {"attention", "search_spaces", "trainers", "orchestrator"} & {name.partition(".")[0] for name in sys.modules}
assert not ours, ours
save_file(logits, sys.argv[2])
json.dump(found, sys.stdout)
"""


# ---- what is written ---------------------------------------------------------------------------------------------


def scalings(head_dim: int) -> dict[str, dict[str, Any]]:
    """Settings of each kind of rotary embedding that transformers has, for a head of so many rotated dims."""
    factors = [1.0 + 0.1 * index for index in range(head_dim // 2)]
    return {
        "default": {},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
        "longrope": {
            "short_factor": factors,
            "long_factor": [2 * factor for factor in factors],
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "proportional": {"partial_rotary_factor": 0.5},
    }


def with_rope(family: str, kind: str, tiny: Tiny) -> PreTrainedModel | None:
    """A tiny model of a family with this kind of rotary embedding; None if transformers has no such model."""
    plain = tiny(family).config
    rope = copy.deepcopy(getattr(plain, "rope_parameters", None))
    if not rope:
        return tiny(family, vocab_size=2048, **TIED.get(family, {})) if kind == "default" else None
    layout = geometry_of(plain).rotary
    if kind == "proportional" and layout.dims < layout.head_dim:  # rotates a part by another rule
        return None
    created = {"rope_type": kind, "rope_theta": THETA} | scalings(layout.dims)[kind]
    if "full_attention" in rope:
        rope["full_attention"] = created  # layers with a window need no scaling
    else:
        part = {name: rope[name] for name in ("partial_rotary_factor",) if rope.get(name) is not None}
        rope = part | created
    try:
        model = tiny(family, vocab_size=2048, rope_parameters=rope, **TIED.get(family, {}))
        probe(model)
    except Exception:
        return None
    return model


@dataclass(frozen=True)
class Written:
    """A folder, its format, and the logits that any software must compute from it."""

    format: str
    folder: Path
    logits: Tensor
    model_type: str
    has_code: bool
    per_layer: bool = False
    """Whether the config gives layers different settings, which transformers' own classes do not read."""

    @property
    def more(self) -> dict[str, str]:
        """Texts for the tokenizer of the folder."""
        return {"gguf_file": "model.gguf"} if self.format == "gguf" else {}


def formats(model: PreTrainedModel, folder: Path, demo: Path, names: Iterable[str]) -> Iterator[Written]:
    """The model in those of the formats that hold one of the plans, in the first of them that each holds."""
    for name in names:
        # Of GGUF's architectures transformers reads those with one count for all layers
        for kind in ("uniform", "original") if name == "gguf" else ("layers", "apart", "uniform", "original"):
            created = model if kind == "original" else converted(model, PLANS[kind])
            try:
                yield _write(name, created, folder / name, demo)
            except (TargetError, ValueError):
                continue
            break


def _write(name: str, model: PreTrainedModel, folder: Path, demo: Path) -> Written:
    if name == "headfold":
        if not hasattr(model, "plan"):
            raise ValueError("a stock model")
        checkpoint.save(model, folder, demo, plain=False)
        return _written(name, folder, model)
    if name == "stock":
        checkpoint.save(model, folder, demo)
        if checkpoint.load_config(folder).model_type.startswith(TYPE_PREFIX):
            raise ValueError("not stock")
        return _written(name, folder, model)
    target = targets()[name]
    target.support_for(model.config, plan_of(model))
    lowered: Lowered = target.lower(model)
    folder.mkdir()
    target.write(lowered.model, folder, "float32", demo)
    return _written(name, folder, model)


def _written(name: str, folder: Path, model: PreTrainedModel) -> Written:
    file = folder / "config.json"
    if not file.is_file():
        kind = GGUFReader(folder / "model.gguf").fields["general.architecture"].contents()
        return Written(name, folder, probe(model), kind, has_code=False)
    fields = json.loads(file.read_text())
    per_layer = "per_layer_config" in fields
    return Written(name, folder, probe(model), fields["model_type"], "auto_map" in fields, per_layer)


# ---- what opens it -----------------------------------------------------------------------------------------------


def expected(one: Written, trust: bool, ids: list[int]) -> dict[str, Any]:
    """Config, tokenizer and model of a folder, opened with or without permission to run its code. Words that end with
    `...` are of an error. Of a model that both load the same way it is tried once."""
    if one.format == "gguf":
        return {"tokenizer": ids} if one.model_type in GGUF_READ and not trust else {}
    if one.model_type.startswith(TYPE_PREFIX):
        unknown = "does not recognize this architecture..."
        return {"tokenizer": ids, "config": unknown, "model": unknown}
    if one.has_code and one.per_layer and not trust:
        opens = {"config": one.model_type, "model": "per-layer attribute..."}
        return opens if one.model_type == "qwen2" else opens | {"tokenizer": ids}
    if one.has_code and not trust:
        asks = "trust_remote_code..."
        return {"tokenizer": ids, "config": asks, "model": asks}
    opens = {"tokenizer": ids, "config": one.model_type} if one.model_type != "qwen2" else {"config": one.model_type}
    if one.model_type == "nemotron-nas":
        return opens | {"model": "Unrecognized configuration class..."}
    return {} if trust and not one.has_code else opens | {"model": "loaded"}


def faults(written: Iterable[Written], scratch: Path, ids: list[int]) -> list[str]:
    """Return the differences that a clean process finds when it opens some folders."""
    every = [(one, trust, expected(one, trust, ids)) for one in written for trust in (False, True)]
    result, logits = opened(every, scratch)
    wrong = []
    for one, trust, reference_value in every:
        key = f"{one.folder}|{trust}"
        for part, value in reference_value.items():
            got = result[key][part]
            words = value.removesuffix("...") if isinstance(value, str) and value.endswith("...") else None
            if got != value and not (words and words in str(got)):
                wrong.append(f"{key} ({one.model_type}): {part}: wanted {value}, got {got}")
        if key in logits:
            difference = (logits[key] - one.logits).abs().max().item()
            if not difference < 1e-4 * max(1.0, one.logits.abs().max().item()):
                wrong.append(f"{key} ({one.model_type}): logits differ by {difference:.2g}")
    return wrong


def opened(
    every: Iterable[tuple[Written, bool, dict[str, Any]]], scratch: Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The results of a clean process in each folder, and the logits of the models that it loaded, by folder and
    permission to run its code."""
    requested: dict[str, tuple[dict[str, list[str]], dict[str, str]]] = {}
    for one, trust, reference_value in every:
        parts, _ = requested.setdefault(str(one.folder), ({}, one.more))
        parts[str(trust)] = sorted(reference_value)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2048, (2, 48), generator=generator).tolist()  # as `probe` draws them
    (scratch / "asked.json").write_text(json.dumps([requested, TEXT, tokens]))
    environment = os.environ | {"HF_MODULES_CACHE": str(scratch / "modules"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", READ, str(scratch / "asked.json"), str(scratch / "logits.safetensors")]
    done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), load_file(scratch / "logits.safetensors")


KINDS = tuple(scalings(8))
CASES = [("llama", kind) for kind in KINDS]
CASES += [("phi", "default"), ("phi", "longrope"), ("phi3", "longrope"), ("gpt_neox", "yarn"), ("gemma3_text", "yarn")]
"""In `make test` every kind of rotary embedding, and every way of writing one down, in every format."""
OTHERS = sorted({(family, "default") for family in families()} - set(CASES))
"""In `make test` in the formats that transformers does not have itself."""
MORE = sorted(set(itertools.product(sorted(families()), KINDS)) - set(CASES))


def test_all_kinds_of_rotary_embedding_are_here() -> None:
    assert set(KINDS) == {"default", *ROPE_INIT_FUNCTIONS}


def write_all(
    cases: Iterable[tuple[str, str]], names: Iterable[str], tiny: Tiny, scratch: Path, demo: Path
) -> list[Written]:
    """The models of some cases in some formats, as far as there are such models and the formats hold them."""
    written: list[Written] = []
    for family, kind in cases:
        if (model := with_rope(family, kind, tiny)) is not None:
            created = list(formats(model, scratch / f"{family}-{kind}", demo, names))
            assert "headfold" in {one.format for one in created}, (family, kind)
            written += created
    return written


@pytest.mark.extended
def test_a_clean_process_opens_every_format(
    tiny_model: Tiny, demo_tokenizer: Any, demo_dir: Path, tmp_path: Path
) -> None:
    written = write_all(CASES, ALL, tiny_model, tmp_path, demo_dir)
    seen = {(one.format, one.folder.parent.name) for one in written}
    assert {(name, f"llama-{kind}") for name in ALL for kind in KINDS if name not in ("phi", "gguf")} <= seen
    assert {("phi", "gpt_neox-yarn"), ("gguf", "llama-llama3")} <= seen
    written += write_all(OTHERS, ("headfold", "transformers", "vllm"), tiny_model, tmp_path, demo_dir)
    first = {(one.folder.parent, one.model_type, one.has_code): one for one in reversed(written)}
    wrong = faults(first.values(), tmp_path, demo_tokenizer(TEXT)["input_ids"])
    assert not wrong, "\n".join(wrong)


@pytest.mark.extended
@pytest.mark.slow
def test_a_clean_process_opens_every_format_of_every_kind_of_rotary_embedding(
    tiny_model: Tiny, demo_tokenizer: Any, demo_dir: Path, tmp_path: Path
) -> None:
    written = write_all(MORE, ALL, tiny_model, tmp_path, demo_dir)
    wrong = faults(written, tmp_path, demo_tokenizer(TEXT)["input_ids"])
    assert not wrong, "\n".join(wrong)
