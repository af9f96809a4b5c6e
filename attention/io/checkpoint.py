"""Save and load checkpoints: safetensors and JSON only, written atomically.

A plan that is uniform GQA after permuting heads is written as the plain family, so that stock
transformers loads it; any other as a `headfold_<family>` model. `headfold.json` in the same folder
records the plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from attention.base.messages import reason
from attention.families import families, family_of, geometry_of
from attention.io import weights
from attention.io.files import honour_umask, sha256, write_whole
from attention.io.replacing import DIGESTS, digests, parents_made, recover, resolved, swap, unused
from attention.io.safetensors_files import weight_files
from attention.io.sources import NOT_REACHED, CheckpointError, only_cached
from attention.io.stock_files import put_tokenizer, write_both_forms
from attention.io.wide_form import WideFormError, to_wide, wide_config
from attention.modeling import model_classes
from attention.modeling.beside import beside_original, copy_common
from attention.modeling.model_classes import TYPE_PREFIX, family_fields, plan_of
from attention.plan import AttentionPlan

PLAN_FILE = "headfold.json"
LLAMA_ONLY = ("attention_bias", "mlp_bias", "pretraining_tp")
"""Fields of a Llama's config that Mistral does not know."""
KV_HEADS = "num_key_value_heads"
PLAN_FIELDS = ("plan", "plan_digest")
ORIGINAL = "original"  # in that file: what the checkpoint was converted from


def write_atomically(
    folder: str | Path, write: Callable[[Path], object], *, overwrite: bool = True
) -> Path:
    """Call `write` on an empty folder next to `folder`, then swap it in; return `folder`.

    A killed write leaves the old folder. See `put_in_place` for what may be replaced.
    """
    folder = resolved(folder)
    with parents_made(folder):
        fresh = unused(folder)
        fresh.mkdir()
        try:
            write(fresh)
            put_in_place(fresh, folder, overwrite=overwrite)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return folder


def put_in_place(fresh: Path, folder: Path, *, overwrite: bool = True) -> None:
    """Rename a finished folder to `folder` on the same disk, with the digests of its files.

    A folder that we wrote earlier gives way to it, unless `overwrite` is off.

    Raises:
        OutputError: If anything else is there.
    """
    write_digests(fresh)
    honour_umask(fresh)
    for path in fresh.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    swap(fresh, folder, overwrite)


def plain_form(config: PretrainedConfig, plan: AttentionPlan) -> PretrainedConfig | None:
    """Return the config of the plain family that carries out `plan`; None if it has none.

    Query heads must be permuted for it (`to_plain`).
    """
    if not plan.is_uniform_gqa:
        return None
    if plan.is_wide:
        try:
            config, plan = wide_config(config, plan)
        except WideFormError:
            return None
    family = family_of(config)
    plain = family.plain_config(config, plan.layers[0].key_heads)
    return None if plain is None else family.config_class(**family_fields(plain))


def to_plain(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model as its plain family, with the query heads of each group side by side.

    It is only for writing or measuring: parameters outside of attention share `model`'s memory.

    Raises:
        ValueError: If the plan is not uniform GQA or the family has no GQA form.
    """
    plan = plan_of(model)
    family = family_of(model.config)
    config = plain_form(model.config, plan)
    if config is not None and plan.is_wide:
        return to_plain(to_wide(model))
    if config is None:
        raise ValueError(
            "only a plan with one map for keys and values and equal groups in all layers has a "
            f"plain {family.name} form; see `headfold export` for other lowerings"
        )
    plain = beside_original(
        model, lambda: family.model_class._from_config(config, dtype=model.dtype)
    )
    # In attention modules the names may differ, or the shapes: they are written below.
    copy_common(model, plain)
    geometry = geometry_of(model.config)
    old_modules = family.attention_modules(model)
    new_modules = family.attention_modules(plain)
    for old, new, layer in zip(old_modules, new_modules, plan.layers, strict=True):
        order = [head for group in layer.key_groups for head in group]
        family.write(new, family.read(old, geometry).permute(order))
    plain.generation_config = model.generation_config
    return plain.train(model.training)


def save(
    model: PreTrainedModel,
    folder: str | Path,
    tokenizer: Any = None,
    *,
    plain: bool = True,
    record: dict[str, Any] | None = None,
    overwrite: bool = True,
) -> Path:
    """Write a checkpoint atomically and return its folder.

    Args:
        model: What is written.
        folder: Where.
        tokenizer: One of transformers, or the folder or hub name whose tokenizer files and
            generation config are copied byte for byte.
        plain: Whether the plain form is written where there is one.
        record: Further content of `headfold.json`, in addition to the plan.
        overwrite: Whether a checkpoint that was saved there earlier is replaced.

    Raises:
        OutputError: If anything else is there.
    """
    plan = plan_of(model)
    headfold_format = model.config.model_type.startswith(TYPE_PREFIX)
    lowered = headfold_format and plain and plain_form(model.config, plan) is not None
    written = to_plain(model) if lowered else model

    def write(fresh: Path) -> None:
        write_model(written, fresh, tokenizer)
        write_note(fresh, plan, record)

    return write_atomically(folder, write, overwrite=overwrite)


def write_model(model: PreTrainedModel, folder: Path, tokenizer: Any = None) -> None:
    """Write weights and config as any software that loads the model expects them.

    Tokenizer files are in the same folder (see `save`).
    """
    model.save_pretrained(folder, safe_serialization=True)
    write_both_forms(folder)
    if tokenizer is not None:
        put_tokenizer(tokenizer, folder)


def write_digests(folder: str | Path) -> None:
    """Write the SHA-256 of every file of a finished folder into it, for `intact`."""
    listed = {name: sha256(path) for name, path in _files(Path(folder)).items()}
    text = json.dumps(listed, indent=1, sort_keys=True) + "\n"
    (Path(folder) / DIGESTS).write_text(text, encoding="utf-8")


def intact(folder: str | Path) -> bool:
    """Whether a folder has exactly the files and bytes that `write_digests` has listed."""
    folder = Path(folder)
    try:
        recover(folder)
        listed = digests(folder)
        present = _files(folder).items()
        return bool(listed) and listed == {name: sha256(path) for name, path in present}
    except OSError:
        return False


def _files(folder: Path) -> dict[str, Path]:
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in sorted(files.items()) if name != DIGESTS}


def write_note(folder: Path, plan: AttentionPlan, record: dict[str, Any] | None = None) -> None:
    """Write the plan of the conversion to the checkpoint's folder, with the fields of `record`."""
    note = {"plan": plan.to_dict(), "plan_digest": plan.digest, **(record or {})}
    (folder / PLAN_FILE).write_text(json.dumps(note, indent=1, sort_keys=True) + "\n")


def note_of(folder: str | Path) -> dict[str, Any]:
    """Return the note that `write_note` has written to the folder; empty for any other checkpoint.

    Raises:
        CheckpointError: If it cannot be read.
    """
    file = Path(folder) / PLAN_FILE
    try:
        record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise CheckpointError(
            f"{str(file)!r} is not the JSON that was written there: {error}"
        ) from None
    if not isinstance(record, dict):
        raise CheckpointError(f"{str(file)!r} must hold a JSON object, got {type(record).__name__}")
    return record


def original_note(own_heads: int, head_dim: int, **names: str | None) -> dict[str, Any]:
    """Return what `record` of `save` says of the original model.

    Args:
        own_heads: Its key and value heads (`attention.ratios.own_heads`).
        head_dim: Their head dim.
        **names: What it is called; None where that is not known.
    """
    called = {key: value for key, value in names.items() if value is not None}
    return {ORIGINAL: {"key_and_value_heads": own_heads, "head_dim": head_dim, **called}}


def original_heads(folder: str | Path, head_dim: int) -> float | None:
    """Return key plus value heads of the model that a checkpoint was converted from.

    Args:
        folder: Of the checkpoint.
        head_dim: Dims that make a head. A checkpoint of wider heads than its original's has fewer
            of them in the same bytes.

    Returns:
        The heads, a fraction where wider ones do not fill the original's bytes; None where they
            were not recorded.
    """
    shape = original_shape(folder, head_dim)
    return None if shape is None else shape[0] * shape[1] / head_dim


def original_shape(folder: str | Path, head_dim: int) -> tuple[int, int] | None:
    """Return key plus value heads, and their head dim, of the model before its conversion.

    Args:
        folder: Of the checkpoint.
        head_dim: The checkpoint's: notes from before there were wide heads have none, and it was
            that of the checkpoint.

    Returns:
        None where they were not recorded.
    """
    original = note_of(folder).get(ORIGINAL, {})
    heads = original.get("key_and_value_heads")
    return None if heads is None else (heads, original.get("head_dim", head_dim))


def carried(folder: str | Path) -> dict[str, Any]:
    """Return what the note of a checkpoint hands on to all that is made of it.

    It is for `record` of `save`.
    """
    return {key: value for key, value in note_of(folder).items() if key == ORIGINAL}


def load(
    source: str | Path,
    dtype: torch.dtype | str | None = None,
    *,
    config: Any = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a Headfold or any supported plain checkpoint in evaluation mode.

    All but the maps is checked before any weight of a folder is read.

    Args:
        source: Local folder or hub name.
        dtype: None keeps the checkpoint's own.
        config: Its config, where that was read before.
        trust_remote_code: As in transformers.

    Raises:
        CheckpointError: If nothing is there.
        ValueError: For an unsupported family.
        WeightsError: For weights that are not those of the config.
        PlanError: If maps and config disagree.
    """
    model_classes.register()
    if config is None:
        config = load_config(source, trust_remote_code=trust_remote_code)
    family_of(config)
    weights.check_weights(source, config)
    cached = only_cached(source)
    try:
        with weights.without_report():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(source),
                config=config,
                dtype=dtype or "auto",
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                local_files_only=cached,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `check_loaded` names them
            )
    except OSError as error:
        raise CheckpointError(
            f"no safetensors weights in {str(source)!r}: {reason(error)}"
        ) from None
    model, report = loaded
    weights.check_loaded(source, model, report)
    if config.model_type.startswith(TYPE_PREFIX):
        model_classes.check_maps(model)
    return model.eval()


def load_config(source: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Return the config of a local folder or hub name.

    A Llama whose width is no multiple of its heads, which LlamaConfig refuses, is a Mistral without
    a window.

    Raises:
        CheckpointError: If there is none, or if it cannot be used.
    """
    model_classes.register()
    cached = False
    try:
        if Path(source).name and Path(source).parent.exists():
            recover(Path(source))
        cached = only_cached(source)
        fields, _ = PretrainedConfig.get_config_dict(str(source), local_files_only=cached)
        _check_fields(fields, source, trust_remote_code)
        if (mistral := _as_mistral(fields, source)) is not None:
            return model_classes.one_form(mistral)
        config = AutoConfig.from_pretrained(
            str(source), trust_remote_code=trust_remote_code, local_files_only=cached
        )
        if config.model_type in ("llama", f"{TYPE_PREFIX}llama"):
            # Of a model that was made into a Llama: its class has no window, and ignores it
            vars(config).pop("sliding_window", None)
        return model_classes.one_form(config)
    except CheckpointError:
        raise
    # A config.json may hold anything, and its class may stumble over it in any way
    except Exception as error:
        file = Path(source) / "config.json"
        if file.is_file():
            raise CheckpointError(f"{str(file)!r} cannot be used: {reason(error)}") from None
        why = NOT_REACHED.format(source) if cached else reason(error)
        raise CheckpointError(
            f"no checkpoint at {str(source)!r}: expected a folder with config.json and "
            f"safetensors, or a hub name; {why}"
        ) from None


def _check_fields(fields: Mapping[str, Any], source: str | Path, trust_remote_code: bool) -> None:
    """Raise CheckpointError for a config that transformers would refuse or read in part."""
    kind = str(fields.get("model_type"))
    supported = {name for family in families() for name in (family, TYPE_PREFIX + family)}
    runs_code = kind not in supported and kind not in CONFIG_MAPPING
    if fields.get("auto_map") and not trust_remote_code and runs_code:
        raise CheckpointError(
            f"{source}: a model of type {kind!r} is computed by Python files next to it "
            "(auto_map in config.json), which Headfold does not run; supported are "
            f"{', '.join(sorted(families()))}. If it is an export, give the checkpoint that it was "
            "made from; if it is one of these under another name, set model_type in config.json "
            "and remove auto_map"
        )
    known = families().get(kind.removeprefix(TYPE_PREFIX))
    read_as_is = known is not None and known.reads_layer_config
    layers = {} if read_as_is else fields.get("per_layer_config") or {}
    differing: dict[str, list[str]] = {}
    for layer, settings in layers.items() if isinstance(layers, Mapping) else ():
        for name, value in settings.items():
            if name != KV_HEADS and (name not in fields or fields[name] != value):
                differing.setdefault(name, []).append(str(layer))
    if differing:
        listed = "; ".join(
            f"{name} in {len(where)}: {', '.join(where[:8])}" for name, where in differing.items()
        )
        raise CheckpointError(
            f"{source}: config.json gives layers different settings (per_layer_config: "
            f"{listed}), of which Headfold reads {KV_HEADS} alone; give the original model, whose "
            f"layers are alike, and convert it by a recipe with a different count for each "
            f"layer (headfold_layers)"
        )


def _as_mistral(fields: Mapping[str, Any], source: str | Path) -> PretrainedConfig | None:
    """Return the Mistral config of a Llama with a width that is no multiple of its heads.

    Target gqa exports such. None for any other.

    Raises:
        CheckpointError: For one with biases, which Mistral has not.
    """
    if fields.get("model_type") != "llama" or not fields.get("head_dim"):
        return None
    width = fields.get("hidden_size")
    heads = fields.get("num_attention_heads")
    if not isinstance(width, int) or not isinstance(heads, int) or heads < 1 or width % heads == 0:
        return None
    kv_heads = fields.get("num_key_value_heads") or heads
    if not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
        return None  # LlamaConfig says so itself
    if fields.get("attention_bias") or fields.get("mlp_bias"):
        raise CheckpointError(
            f"{source}: a Llama of width {width} with {heads} heads is read as a Mistral, since "
            "LlamaConfig refuses a width that is no multiple of the heads, and a Mistral has no "
            "biases (attention_bias, mlp_bias); take a model without them"
        )
    unknown = ("model_type", "architectures", "auto_map", *LLAMA_ONLY)
    settings: dict[str, Any] = {
        name: value for name, value in fields.items() if name not in unknown and name[:1] != "_"
    }
    settings |= {"sliding_window": None, "num_key_value_heads": kv_heads}
    mistral = MistralConfig(**settings)
    mistral.architectures = ["MistralForCausalLM"]
    return mistral


def weights_digest(folder: str | Path, cache_dir: str | Path | None = None) -> str:
    """Return the SHA-256 of the safetensors files of a folder, first 16 hex digits.

    The digest covers their names and bytes, but not those of a second copy of the weights
    (`attention.io.safetensors_files.weight_files`). It is cached in `cache_dir`, if given, and the
    files are read again only when the size or time of one has changed.
    """
    files = weight_files(Path(folder))
    note = None
    if cache_dir is not None:
        stamps = [[str(p.absolute()), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
        name = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:24]
        note = Path(cache_dir) / f"weights-{name}.txt"
        if note.is_file():
            return note.read_text(encoding="utf-8").strip()
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    if note is not None:
        write_whole(note, digest.hexdigest()[:16] + "\n")
    return digest.hexdigest()[:16]
