"""Save and load checkpoints: safetensors and JSON only, atomic, plain family where the plan allows it.

A plan that is uniform GQA after permuting heads is written as the plain family, so that stock transformers loads it;
any other as a `headfold_<family>` model. `headfold.json` beside the weights records the plan that was carried out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from attention import modeling
from attention.families import family_of
from attention.geometry import HeadGeometry
from attention.modeling import PREFIX, plan_of
from attention.plan import AttentionPlan

__all__ = [
    "DIGESTS",
    "PLAN_FILE",
    "intact",
    "load",
    "plan_of",
    "save",
    "to_plain",
    "weights_digest",
    "write_atomically",
    "write_digests",
]

PLAN_FILE = "headfold.json"
DIGESTS = "digests.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read. The message names the path and what to do."""


def _spare(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def recover(folder: Path) -> None:
    """If a save was killed between its two renames, put the old checkpoint back."""
    if not folder.exists() and _spare(folder).exists():
        _spare(folder).rename(folder)


def write_atomically(folder: str | Path, write: Callable[[Path], None]) -> Path:
    """Call `write` on an empty folder beside `folder`, then swap it in. A killed write leaves the old folder."""
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        write(fresh)
        put_in_place(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def put_in_place(fresh: Path, folder: Path) -> None:
    """Rename a finished folder to `folder` on the same disk; what was there steps aside first, and then goes."""
    recover(folder)
    for path in fresh.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
    if folder.exists():
        shutil.rmtree(_spare(folder), ignore_errors=True)
        folder.rename(_spare(folder))
    fresh.rename(folder)
    shutil.rmtree(_spare(folder), ignore_errors=True)


def plain_form(config: PretrainedConfig, plan: AttentionPlan) -> PretrainedConfig | None:
    """The config of the plain family that carries out `plan`, once query heads are permuted; None if it has none."""
    family = family_of(config)
    found = family.plain_config(config, plan.layers[0].key_heads) if plan.is_uniform_gqa else None
    if found is None:
        return None
    fields = found.to_dict()
    for key in ("model_type", "architectures", "attention_plan"):
        fields.pop(key, None)
    return family.config_class(**fields)


def to_plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same model as its plain family: query heads permuted so that each group's members are neighbours.

    Raises ValueError if the plan is not uniform GQA or the family has no GQA form.
    """
    plan, family = plan_of(model), family_of(model.config)
    config = plain_form(model.config, plan)
    if config is None:
        raise ValueError(
            f"only a plan with one map for keys and values and equal groups in all layers has a plain {family.name} "
            "form; see `headfold export` for other lowerings"
        )
    plain = family.model_class._from_config(config, dtype=model.dtype)
    nn.Module.to(plain, model.device)
    state = {k: t for k, t in model.state_dict().items() if not k.endswith((".key_map", ".value_map"))}
    plain.load_state_dict(state)
    geometry = HeadGeometry.from_config(model.config)
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
) -> Path:
    """Write a checkpoint atomically and return its folder.

    `plain=False` keeps the Headfold form even where a plain one exists. `record` goes into `headfold.json`.
    """
    plan = plan_of(model)
    own = model.config.model_type.startswith(PREFIX)
    lowered = own and plain and plain_form(model.config, plan) is not None
    written = to_plain(model) if lowered else model

    def write(fresh: Path) -> None:
        written.save_pretrained(fresh, safe_serialization=True)
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
        write_note(fresh, plan, record)
        write_digests(fresh)

    return write_atomically(folder, write)


def write_digests(folder: str | Path) -> None:
    """Put the SHA-256 of every file of a finished folder beside them, for `intact`."""
    found = {name: _sha256(path) for name, path in _files(Path(folder)).items()}
    (Path(folder) / DIGESTS).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def intact(folder: str | Path) -> bool:
    """Whether a folder holds exactly the files and bytes that `write_digests` has found. False without its file."""
    folder = Path(folder)
    try:
        recover(folder)
        wanted = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        files = _files(folder)
        return files.keys() == wanted.keys() and all(_sha256(path) == wanted[name] for name, path in files.items())
    except (OSError, ValueError):
        return False


def _files(folder: Path) -> dict[str, Path]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in sorted(found.items()) if name != DIGESTS}


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_note(folder: Path, plan: AttentionPlan, record: dict[str, Any] | None = None) -> None:
    """Put the plan that was carried out beside the weights, with whatever else is to be remembered."""
    note = {"plan": json.loads(plan.to_json()), "plan_digest": plan.digest, **(record or {})}
    (folder / PLAN_FILE).write_text(json.dumps(note, indent=1, sort_keys=True) + "\n")


def load(
    source: str | Path, dtype: torch.dtype | str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a Headfold or any supported plain checkpoint (local folder or hub name) in evaluation mode.

    `dtype` None keeps the checkpoint's own. Raises CheckpointError if nothing is there, ValueError for an unsupported
    family (before any weight is read), PlanError if maps and config disagree.
    """
    modeling.register()
    config = load_config(source, trust_remote_code=trust_remote_code)
    family_of(config)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(source), dtype=dtype or "auto", trust_remote_code=trust_remote_code, use_safetensors=True
        )
    except OSError as error:
        raise CheckpointError(f"no safetensors weights in {str(source)!r}: {str(error).splitlines()[0]}") from None
    if config.model_type.startswith(PREFIX):
        modeling.check_maps(model)
    return model.eval()


def load_config(source: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The config of a local folder or hub name. Raises CheckpointError if there is none."""
    modeling.register()
    try:
        if Path(source).parent.exists():
            recover(Path(source))
        return AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except Exception as error:  # a config.json may hold anything, and its class may stumble over it in any way
        said = (str(error).splitlines() or [type(error).__name__])[0][:500]
        raise CheckpointError(
            f"no checkpoint at {str(source)!r}: expected a folder with config.json and safetensors, or a hub name; "
            f"{said}"
        ) from None


def weights_digest(folder: str | Path) -> str:
    """SHA-256 over the names and bytes of the safetensors files of a checkpoint folder, first 16 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")):
        digest.update(path.name.encode())
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]
