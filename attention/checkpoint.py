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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attention import modeling
from attention.families import family_of
from attention.geometry import HeadGeometry
from attention.modeling import PREFIX, plan_of

__all__ = ["PLAN_FILE", "load", "plan_of", "save", "to_plain", "weights_digest", "write_atomically"]

PLAN_FILE = "headfold.json"


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
    recover(folder)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        write(fresh)
        for path in fresh.rglob("*"):
            if path.is_file():
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
        if folder.exists():
            shutil.rmtree(_spare(folder), ignore_errors=True)
            folder.rename(_spare(folder))
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(_spare(folder), ignore_errors=True)
    return folder


def to_plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same model as its plain family: query heads permuted so that each group's members are neighbours.

    Raises ValueError if the plan is not uniform GQA or the family has no GQA form.
    """
    plan, family = plan_of(model), family_of(model.config)
    config = family.plain_config(model.config, plan.layers[0].key_heads) if plan.is_uniform_gqa else None
    if config is None:
        raise ValueError(
            f"only a plan with one map for keys and values and equal groups in all layers has a plain {family.name} "
            "form; see `headfold export` for other lowerings"
        )
    fields = config.to_dict()
    for key in ("model_type", "architectures", "attention_plan"):
        fields.pop(key, None)
    plain = family.model_class._from_config(family.config_class(**fields), dtype=model.dtype)
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
    has_plain = plan.is_uniform_gqa and family_of(model.config).plain_config(model.config, plan.layers[0].key_heads)
    lowered = own and plain and has_plain
    written = to_plain(model) if lowered else model

    def write(fresh: Path) -> None:
        written.save_pretrained(fresh, safe_serialization=True)
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
        note = {"plan": json.loads(plan.to_json()), "plan_digest": plan.digest, **(record or {})}
        (fresh / PLAN_FILE).write_text(json.dumps(note, indent=1, sort_keys=True) + "\n")

    return write_atomically(folder, write)


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
    if Path(source).parent.exists():
        recover(Path(source))
    try:
        return AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"no checkpoint at {str(source)!r}: expected a folder with config.json and safetensors, or a hub name; "
            f"{str(error).splitlines()[0]}"
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
