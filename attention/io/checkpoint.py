"""Save and load checkpoints: safetensors and JSON only, atomic, plain family where the plan allows it.

A plan that is uniform GQA after permuting heads is written as the plain family, so that stock transformers loads it;
any other as a `headfold_<family>` model. `headfold.json` beside the weights records the plan that was carried out.
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
from attention.io.sources import NOT_REACHED, CheckpointError, only_cached
from attention.io.stock_files import put_tokenizer, write_both_forms
from attention.modeling import model_classes
from attention.modeling.beside import beside_original
from attention.modeling.model_classes import TYPE_PREFIX, family_fields, plan_of
from attention.plan import AttentionPlan

PLAN_FILE = "headfold.json"
LLAMA_ONLY = ("attention_bias", "mlp_bias", "pretraining_tp")
"""Fields of a Llama's config that Mistral does not know."""
ORIGINAL = "original"  # in that file: what the checkpoint was converted from


def write_atomically(folder: str | Path, write: Callable[[Path], object], *, overwrite: bool = True) -> Path:
    """Call `write` on an empty folder beside `folder`, then swap it in. A killed write leaves the old folder.

    See `put_in_place` for what may be replaced.
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
    """Rename a finished folder to `folder` on the same disk, with the digests of its files; a folder that we wrote
    earlier gives way to it, unless `overwrite` is off. Raises OutputError if anything else is there."""
    write_digests(fresh)
    honour_umask(fresh)
    for path in fresh.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    swap(fresh, folder, overwrite)


def plain_form(config: PretrainedConfig, plan: AttentionPlan) -> PretrainedConfig | None:
    """The config of the plain family that carries out `plan`, once query heads are permuted; None if it has none."""
    family = family_of(config)
    plain = family.plain_config(config, plan.layers[0].key_heads) if plan.is_uniform_gqa else None
    return None if plain is None else family.config_class(**family_fields(plain))


def to_plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same model as its plain family: query heads permuted so that each group's members are neighbours.

    It is to be written or measured: what lies outside of attention is `model`'s memory. Raises ValueError if the plan
    is not uniform GQA or the family has no GQA form.
    """
    plan = plan_of(model)
    family = family_of(model.config)
    config = plain_form(model.config, plan)
    if config is None:
        raise ValueError(
            f"only a plan with one map for keys and values and equal groups in all layers has a plain {family.name} "
            "form; see `headfold export` for other lowerings"
        )
    plain = beside_original(model, lambda: family.model_class._from_config(config, dtype=model.dtype))
    wanted = plain.state_dict()
    # In attention modules the names may differ, or the shapes: they are written below.
    state = {k: t for k, t in model.state_dict().items() if k in wanted and t.shape == wanted[k].shape}
    plain.load_state_dict(state, strict=False)
    geometry = geometry_of(model.config)
    modules = zip(family.attention_modules(model), family.attention_modules(plain), plan.layers, strict=True)
    for old, new, layer in modules:
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

    `tokenizer`: one of transformers, or the folder or hub name whose tokenizer files and generation config are copied
    byte for byte. `plain=False` keeps the Headfold form even where a plain one exists. `record` goes into
    `headfold.json`. Without `overwrite` not even a checkpoint that was saved there earlier is replaced; nothing else
    ever is (OutputError).
    """
    plan = plan_of(model)
    own = model.config.model_type.startswith(TYPE_PREFIX)
    lowered = own and plain and plain_form(model.config, plan) is not None
    written = to_plain(model) if lowered else model

    def write(fresh: Path) -> None:
        write_model(written, fresh, tokenizer)
        write_note(fresh, plan, record)

    return write_atomically(folder, write, overwrite=overwrite)


def write_model(model: PreTrainedModel, folder: Path, tokenizer: Any = None) -> None:
    """Weights and config, as any software that loads the model expects them, and what lies beside (see `save`)."""
    model.save_pretrained(folder, safe_serialization=True)
    write_both_forms(folder)
    if tokenizer is not None:
        put_tokenizer(tokenizer, folder)


def write_digests(folder: str | Path) -> None:
    """Put the SHA-256 of every file of a finished folder beside them, for `intact`."""
    listed = {name: sha256(path) for name, path in _files(Path(folder)).items()}
    (Path(folder) / DIGESTS).write_text(json.dumps(listed, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def intact(folder: str | Path) -> bool:
    """Whether a folder holds exactly the files and bytes that `write_digests` has found. False without its file."""
    folder = Path(folder)
    try:
        recover(folder)
        listed = digests(folder)
        return bool(listed) and listed == {name: sha256(path) for name, path in _files(folder).items()}
    except OSError:
        return False


def _files(folder: Path) -> dict[str, Path]:
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in sorted(files.items()) if name != DIGESTS}


def write_note(folder: Path, plan: AttentionPlan, record: dict[str, Any] | None = None) -> None:
    """Put the plan that was carried out beside the weights, with whatever else is to be remembered."""
    note = {"plan": plan.to_dict(), "plan_digest": plan.digest, **(record or {})}
    (folder / PLAN_FILE).write_text(json.dumps(note, indent=1, sort_keys=True) + "\n")


def note_of(folder: str | Path) -> dict[str, Any]:
    """What `write_note` has put beside the weights; empty for any other checkpoint. Raises CheckpointError."""
    file = Path(folder) / PLAN_FILE
    try:
        record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise CheckpointError(f"{str(file)!r} is not the JSON that was written there: {error}") from None
    if not isinstance(record, dict):
        raise CheckpointError(f"{str(file)!r} must hold a JSON object, got {type(record).__name__}")
    return record


def original_note(own_heads: int, **named: str | None) -> dict[str, Any]:
    """For `record` of `save`: key and value heads of the original model (`attention.ratios.own_heads`), and what it is
    called, as far as that is known."""
    known = {key: value for key, value in named.items() if value is not None}
    return {ORIGINAL: {"key_and_value_heads": own_heads, **known}}


def original_heads(folder: str | Path) -> int | None:
    """Key and value heads of the model that a checkpoint was converted from; None where that was not recorded."""
    return note_of(folder).get(ORIGINAL, {}).get("key_and_value_heads")


def carried(folder: str | Path) -> dict[str, Any]:
    """Of the note of a checkpoint what holds for all that is made of it, for `record` of `save`."""
    return {key: value for key, value in note_of(folder).items() if key == ORIGINAL}


def load(
    source: str | Path,
    dtype: torch.dtype | str | None = None,
    *,
    config: Any = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a Headfold or any supported plain checkpoint (local folder or hub name) in evaluation mode.

    `dtype` None keeps the checkpoint's own; `config` is its config, where that was read before. Raises CheckpointError
    if nothing is there, ValueError for an unsupported family and WeightsError for weights that are not those of the
    config (all before any weight of a folder is read), PlanError if maps and config disagree.
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
        raise CheckpointError(f"no safetensors weights in {str(source)!r}: {reason(error)}") from None
    model, told = loaded
    weights.check_loaded(source, model, told)
    if config.model_type.startswith(TYPE_PREFIX):
        model_classes.check_maps(model)
    return model.eval()


def load_config(source: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The config of a local folder or hub name. Raises CheckpointError if there is none, or if it cannot be used.

    A Llama whose width is no multiple of its heads, which LlamaConfig refuses, is a Mistral without a window.
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
            return mistral
        return AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code, local_files_only=cached)
    except CheckpointError:
        raise
    except Exception as error:  # a config.json may hold anything, and its class may stumble over it in any way
        if (Path(source) / "config.json").is_file():
            raise CheckpointError(f"{str(Path(source) / 'config.json')!r} cannot be used: {reason(error)}") from None
        why = NOT_REACHED.format(source) if cached else reason(error)
        raise CheckpointError(
            f"no checkpoint at {str(source)!r}: expected a folder with config.json and safetensors, or a hub name; "
            f"{why}"
        ) from None


def _check_fields(fields: Mapping[str, Any], source: str | Path, trust_remote_code: bool) -> None:
    """Raise CheckpointError for a config that transformers would answer in words of its own, or read by half."""
    kind = str(fields.get("model_type"))
    known = {name for family in families() for name in (family, TYPE_PREFIX + family)}
    if fields.get("auto_map") and not trust_remote_code and kind not in known and kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{source}: a model of type {kind!r} is computed by Python files that lie beside it (auto_map in "
            f"config.json), which Headfold does not run; supported are {', '.join(sorted(families()))}. If it is an "
            "export, give the checkpoint that it was made from; if it is one of these under another name, set "
            "model_type in config.json and remove auto_map"
        )
    layers = fields.get("per_layer_config") or {}
    own = layers.items() if isinstance(layers, Mapping) else ()
    differing: dict[str, list[str]] = {}
    for layer, settings in own:
        for name, value in settings.items():
            if name not in fields or fields[name] != value:
                differing.setdefault(name, []).append(str(layer))
    if differing:
        listed = "; ".join(f"{name} in {len(where)}: {', '.join(where[:8])}" for name, where in differing.items())
        raise CheckpointError(
            f"{source}: config.json gives layers settings of their own (per_layer_config: {listed}), which Headfold "
            "does not read; give the original model, whose layers are alike, and convert it by a recipe that gives "
            "each layer a count of its own (headfold_layers)"
        )


def _as_mistral(fields: Mapping[str, Any], source: str | Path) -> PretrainedConfig | None:
    """The config of a Llama with a width that is no multiple of its heads, as target gqa exports one; None for any
    other. Raises CheckpointError for one with biases, which Mistral has not."""
    if fields.get("model_type") != "llama" or not fields.get("head_dim"):
        return None
    width = fields.get("hidden_size")
    heads = fields.get("num_attention_heads")
    if not isinstance(width, int) or not isinstance(heads, int) or heads < 1 or width % heads == 0:
        return None
    kv_heads = fields.get("num_key_value_heads") or heads
    if not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:  # which LlamaConfig says itself
        return None
    if fields.get("attention_bias") or fields.get("mlp_bias"):
        raise CheckpointError(
            f"{source}: a Llama of width {width} with {heads} heads is read as a Mistral, since LlamaConfig refuses a "
            "width that is no multiple of the heads, and a Mistral has no biases (attention_bias, mlp_bias); take a "
            "model without them"
        )
    unknown = ("model_type", "architectures", "auto_map", *LLAMA_ONLY)
    settings: dict[str, Any] = {n: v for n, v in fields.items() if n not in unknown and n[:1] != "_"}
    settings["sliding_window"] = None
    made = MistralConfig(**settings)
    made.architectures = ["MistralForCausalLM"]
    return made


def weights_digest(folder: str | Path, cache_dir: str | Path | None = None) -> str:
    """SHA-256 over the names and bytes of the safetensors files of a checkpoint folder, first 16 hex digits.

    With `cache_dir` it is kept there, and the files are read again only when the size or time of one has changed.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    note = None
    if cache_dir is not None:
        stamps = [[str(p.absolute()), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
        note = Path(cache_dir) / f"weights-{hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:24]}.txt"
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
