"""Files next to the weights that make a folder load elsewhere as the original's does.

transformers 5 keeps the rotary embedding in `rope_parameters`. Older ones, and tools that read
config.json themselves, look for `rope_theta`, `rope_scaling` and `torch_dtype`, and silently take
defaults where they are not: both forms are written. Tokenizer files are copied byte for byte, since
saving them anew names classes that older ones do not know.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,  # type: ignore[reportPrivateImportUsage]
)

from attention.io.sources import fetched

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model*", "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tekken.json",
    "spiece.model", "sentencepiece*.model", "chat_template.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
GENERATION = "generation_config.json"


def copy_files(source: str | Path, folder: Path) -> None:
    """Copy the tokenizer, chat templates and generation config of `source` (folder or hub name).

    Files of this kind in `folder` are removed first, so that two sets never mix; a source without a
    tokenizer copies none.
    """
    origin = fetched(source, [*TOKENIZER_FILES, GENERATION], "tokenizer files")
    for pattern in (*TOKENIZER_FILES, GENERATION):
        files = [file for file in sorted(origin.glob(pattern)) if file.is_file()]
        if pattern != GENERATION or files:
            for old in folder.glob(pattern):
                old.unlink()
        for file in files:
            target = folder / file.relative_to(origin)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def put_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer to a checkpoint's folder.

    It is copied from a folder or hub name, or, as an object of transformers, saved.
    """
    if isinstance(tokenizer, (str, Path)):
        copy_files(tokenizer, folder)
        return
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    # What transformers 5 calls it, and 4 does not know.
    if fields.get("tokenizer_class") == "TokenizersBackend":
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        fields.pop("backend", None)
    if isinstance(fields.get("extra_special_tokens"), list):  # names to tokens for transformers 4
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
    _write(file, fields)


def write_both_forms(folder: Path) -> None:
    """Add fields to config.json that tools read instead of transformers 5's.

    These are transformers 4 and others.
    """
    file = folder / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    _write(file, fields | older_form(fields))


def older_form(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of transformers 4 that say what these of transformers 5 do.

    Empty for a model without either.

    `rope_scaling` is left out for model types that transformers does not have. Reading the
    tokenizer of such a folder without its code, or without Headfold, yields transformers' bare
    config class, which cannot read that field together with `rope_theta`. The code in a folder
    passes `rope_parameters` to transformers 4 itself.
    """
    older: dict[str, Any] = {"torch_dtype": fields["dtype"]} if fields.get("dtype") else {}
    if str(fields.get("model_type")).endswith("gemma4_text"):
        # Transformers 4 has no such class; published files name what layers without a window have.
        return older | _without_window(fields.get("per_layer_config") or {})
    rope = fields.get("rope_parameters")
    if rope and "sliding_attention" in rope:  # Gemma 3: one embedding for each kind of layer
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if not rope or "rope_theta" not in rope:
        return older
    if fields.get("model_type") in CONFIG_MAPPING_NAMES:
        older["rope_scaling"] = _scaling(fields["model_type"], rope)
    part = rope.get("partial_rotary_factor")
    if str(fields.get("model_type")).endswith("gpt_neox"):
        names = ("rotary_emb_base", "rotary_pct")
    else:
        names = ("rope_theta", "partial_rotary_factor")
    return older | {names[0]: rope["rope_theta"]} | ({names[1]: part} if part is not None else {})


def _without_window(layers: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return Gemma 4's fields for the layers that `per_layer_config` sets apart."""
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    first = next(iter(layers.values()), {})
    return {names[name]: value for name, value in first.items() if name in names}


def _scaling(model_type: str, rope: dict[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling` of transformers 4.

    If it is there, transformers 5 reads it instead of `rope_parameters`, so that it must be
    complete.
    """
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    # Its class took three fields.
    if model_type == "phi3" and not {"factor", "attention_factor"} & rope.keys():
        return {"type": kind} | {name: rope[name] for name in ("short_factor", "long_factor")}
    return {
        name: value
        for name, value in rope.items()
        if name not in ("rope_theta", "partial_rotary_factor")
    }


def _write(file: Path, fields: dict[str, Any]) -> None:
    file.write_text(
        json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )
