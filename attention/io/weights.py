"""Check that the weights of a checkpoint are those that its config describes.

Every parameter by name and shape.

transformers initialises missing weights at random and continues. Here that is an error, found from
the headers of the safetensors files before any weight is read (`check_weights`), and for hub names
from the load report (`check_loaded`).
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.initialization import no_init_weights
from transformers.utils.loading_report import LoadStateDictInfo

from attention.io.experts import TensorSource, parts_of, stacked, stacks
from attention.io.precision import STORED
from attention.io.safetensors_files import (
    Stored,
    WeightsError,
    listed,
    open_safetensors,
    stored_tensors,
)
from attention.io.sources import source_note

__all__ = ["WeightsError", "check_finite", "check_loaded", "check_weights", "without_report"]

logger = logging.getLogger(__name__)
TIED_APART = (
    "config.json ties the output matrix to the embedding (tie_word_embeddings), but the weights "
    "hold two that differ; "
    "set tie_word_embeddings to false in config.json"
)
METHODS = ("fp8", "compressed-tensors", "mxfp4")
"""Values of `quant_method` whose weights can be read as plain numbers
(`attention.io.quantised.packed`)."""
# Tensors that quantisers store next to or instead of a weight.
QUANTISED = re.compile(
    r"\.(qweight|qzeros|SCB|weight_scale(_inv)?|weight_packed|weight_shape|weight\.(absmax|quant_map|quant_state.*))$"
)
LAYER = re.compile(r"(.*?\.)(\d+)\.")


@dataclass(frozen=True)
class Differences:
    """The differences between a checkpoint's tensors and a model's.

    Attributes:
        wrong: Name -> (shape in the file, in the model).
    """

    missing: frozenset[str]
    wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    surplus: frozenset[str]


def check_weights(source: str | Path, config: PretrainedConfig) -> dict[str, TensorSource]:
    """Return the file of each tensor of the config's model, by name; empty for a hub name.

    Headers alone are read, unless both of two tied matrices are stored: those are compared. Surplus
    tensors are reported in a warning.

    Raises:
        WeightsError: For quantised weights, for files that cannot be read, and unless every
            parameter and persistent buffer is there in its shape (of tied ones, one).
    """
    check_plain(source, config)
    folder = Path(source)
    if not folder.is_dir() or not source_note(folder).get("weights", True):
        return {}
    stored = stored_tensors(folder)
    # Before the model is built: a config of a million layers would take for ever.
    if config.num_hidden_layers > len(stored):
        raise WeightsError(
            f"{folder}: config.json says num_hidden_layers {config.num_hidden_layers}, but the "
            f"weights are "
            f"{len(stored)} tensors in all; copy config.json and weights from one model"
        )
    model = _outline(folder, config)
    try:
        sources = _by_present_name(model, stored)
    except WeightsError as error:
        raise WeightsError(f"{folder}: {error}") from None
    if sources is None:
        # Tensors that transformers changes on loading: `check_loaded` sees what becomes of them.
        return {}
    _check_dtypes(folder, sources, model.state_dict())
    for tied, root in model.all_tied_weights_keys.items():
        if tied in sources and root in sources:
            # No expert is tied.
            first, second = (parts_of(sources[name])[0][0] for name in (tied, root))
            _check_tie(folder, first, second)
        elif present := sources.get(root) or sources.get(tied):
            sources |= {tied: present, root: present}
    _refuse(folder, model, _differences(model, sources))
    return sources


def check_plain(source: str | Path, config: PretrainedConfig) -> None:
    """Raise WeightsError for a config that says its weights are quantised. No file is read."""
    if settings := getattr(config, "quantization_config", None):
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        what = f"config.json has a quantization_config ({method or 'of no name'})"
        raise WeightsError(_quantised(source, what, method))


def _differences(model: PreTrainedModel, sources: Mapping[str, TensorSource]) -> Differences:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {name: source.shape for name, source in sources.items()}
    wrong = {
        name: (stored[name], shape)
        for name, shape in shapes.items()
        if stored.get(name, shape) != shape
    }
    missing = shapes.keys() - stored.keys()
    names = LoadStateDictInfo(missing, stored.keys() - shapes.keys(), set(), [], {}, set())
    # Takes away what its class knows not to need, masks for instance.
    model._adjust_missing_and_unexpected_keys(names)
    return Differences(frozenset(names.missing_keys), wrong, frozenset(names.unexpected_keys))


def check_loaded(source: str | Path, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raise WeightsError unless all of a model came from its checkpoint.

    Args:
        info: Transformers' loading info.
    """
    wrong = {name: (tuple(file), tuple(shape)) for name, file, shape in info["mismatched_keys"]}
    missing = frozenset(info["missing_keys"])
    surplus = frozenset(info["unexpected_keys"])
    _refuse(source, model, Differences(missing - set(wrong), wrong, surplus))
    table = model.get_input_embeddings()
    output = model.get_output_embeddings()
    if (
        model.config.tie_word_embeddings
        and output is not None
        and output.weight is not table.weight
    ):
        raise WeightsError(f"{source}: {TIED_APART}")


@contextmanager
def without_report() -> Iterator[None]:
    """Without transformers' table of what is missing, surplus or of another shape.

    `check_loaded` reports it.
    """
    its = logging.getLogger("transformers.modeling_utils")

    def worse(
        record: logging.LogRecord,
    ) -> bool:  # not a level, which transformers takes for a wish to hear more
        return record.levelno > logging.WARNING

    its.addFilter(worse)
    try:
        yield
    finally:
        its.removeFilter(worse)


@torch.no_grad()
def check_finite(source: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise WeightsError if a number among `tensors` is not finite: every loss would be nan."""
    bad = [
        name
        for name, tensor in tensors.items()
        if tensor.numel()
        and tensor.is_floating_point()
        and not all(e.isfinite() for e in torch.aminmax(tensor))
    ]
    if bad:
        raise WeightsError(
            f"{source}: nan or infinite numbers in {listed(bad)} ({len(bad)} of {len(tensors)} "
            f"tensors read); take a "
            "checkpoint from before its training diverged, or read it in a dtype of wider range "
            "(bfloat16, not float16)"
        )


def _outline(source: Path, config: PretrainedConfig) -> PreTrainedModel:
    """Return the model of a config without memory for its weights."""
    try:
        with torch.device("meta"), no_init_weights():
            return AutoModelForCausalLM.from_config(copy.deepcopy(config))
    except (
        Exception
    ) as error:  # a config may hold anything, and the model's class may stumble over it in any way
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsError(
            f"{source}: config.json describes no {config.model_type} model that can be built: "
            f"{message}"
        ) from None


def _by_present_name(
    model: PreTrainedModel, stored: Mapping[str, Stored]
) -> dict[str, TensorSource] | None:
    """Tensors under the names that transformers gives them on loading, experts put together.

    None if it would do more to some.

    Raises:
        WeightsError: For experts that do not belong together.
    """
    state = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    by_name: dict[str, TensorSource] = {}
    experts: dict[str, dict[str, list[Stored]]] = {}
    for name, source in stored.items():
        present, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if pattern is not None:
            if not stacks(of_pattern[pattern]):
                return None
            experts.setdefault(present, {}).setdefault(pattern, []).append(source)
            continue
        if present not in state and name in state:
            present = name
        by_name[present] = source
    for present, matrices in experts.items():
        by_name[present] = stacked(
            present, matrices, of_pattern[next(iter(matrices))].source_patterns
        )
    return by_name


def _check_dtypes(
    folder: Path, sources: Mapping[str, TensorSource], state: Mapping[str, torch.Tensor]
) -> None:
    odd = {
        name
        for name, source in sources.items()
        if (
            source.dtype not in STORED
            if name in state and state[name].is_floating_point()
            else QUANTISED.search(name)
        )
    }
    if odd:
        kinds = sorted({sources[name].dtype for name in odd})
        raise WeightsError(
            _quantised(folder, f"{len(odd)} tensors of {', '.join(kinds)}: {listed(odd)}")
        )


def _check_tie(folder: Path, first: Stored, second: Stored, rows: int = 4096) -> None:
    """Compare the numbers of two tied matrices that are both stored.

    This is the one case in which numbers are compared.
    """
    with (
        open_safetensors(folder / first.file) as one,
        open_safetensors(folder / second.file) as other,
    ):
        a = one.get_slice(first.name)
        b = other.get_slice(second.name)
        starts = range(0, first.shape[0], rows)
        if first.shape != second.shape or not all(
            torch.equal(a[i : i + rows], b[i : i + rows]) for i in starts
        ):
            raise WeightsError(f"{folder}: {TIED_APART}")


def _quantised(source: str | Path, what: str, method: str | None = None) -> str:
    message = f"{source} is quantised: {what}. Heads are fused in plain floats: "
    if method in METHODS:
        return (
            f"{message}add --dequantize (in a search model.dequantize=true), which reads its "
            f"weights as plain numbers, "
            "or take the model that it was made of"
        )
    return (
        f"{message}take the model that it was made of, or load it in transformers, call "
        f"model.dequantize() and "
        "save_pretrained into a new folder"
    )


def _layers(names: set[str] | frozenset[str]) -> set[tuple[str, int]]:
    return {(match[1], int(match[2])) for name in names if (match := LAYER.match(name))}


def _refuse(source: str | Path, model: PreTrainedModel, diff: Differences) -> None:
    """Raise WeightsError for differences that change what the model computes; log the others."""
    state = set(model.state_dict())
    have = model.config.num_hidden_layers
    kind = type(model).__name__
    prefix = f"{model.base_model_prefix}."
    # Files may leave it out.
    stems = {form for stem, _ in _layers(state) for form in (stem, stem.removeprefix(prefix))}
    beyond = {(stem, n) for stem, n in _layers(diff.surplus) if stem in stems and n >= have}
    if beyond:
        count = max(n for _, n in beyond) + 1
        names = [name for name in diff.surplus if _layers({name}) & beyond]
        raise WeightsError(
            f"{source}: config.json says num_hidden_layers {have}, but the weights are of {count} "
            f"layers; unused would "
            f"be {len(names)} tensors: {listed(names)}. Set num_hidden_layers to {count}"
        )
    if diff.missing:
        raise WeightsError(_lacking(source, kind, have, state, diff))
    if diff.wrong:
        shapes = {
            name: f"{name} {list(file)} instead of {list(shape)}"
            for name, (file, shape) in diff.wrong.items()
        }
        raise WeightsError(
            f"{source}: {len(shapes)} tensors have other shapes than config.json says: "
            f"{listed(shapes.values())}. "
            "Copy config.json and weights from one model"
        )
    if diff.surplus:
        _warn_once(
            f"{source}: {len(diff.surplus)} tensors are not part of {kind} and not used: "
            f"{listed(diff.surplus)}"
        )


def _lacking(source: str | Path, kind: str, layers: int, state: set[str], diff: Differences) -> str:
    message = (
        f"{source} lacks {len(diff.missing)} of the {len(state)} tensors of {kind}: "
        f"{listed(diff.missing)}"
    )
    count = _layers(state - diff.missing)
    whole = max((n for _, n in count), default=-1) + 1
    if diff.surplus:
        return (
            f"{message}; it has {len(diff.surplus)} of other names: {listed(diff.surplus)}. Rename "
            f"them to what "
            f"{kind} calls them, or copy config.json and weights from one model"
        )
    if 0 < whole < layers:
        return (
            f"{message}; config.json says num_hidden_layers {layers}, the weights end after layer "
            f"{whole - 1}: mend one of them"
        )
    if diff.missing == {"lm_head.weight"}:
        return (
            f"{message}, the output matrix. Copy or save the weights of the original model again, "
            f"or set "
            "tie_word_embeddings to true in config.json if its output matrix is the embedding"
        )
    return f"{message}. Copy or save the weights of the original model again"


@cache
def _warn_once(text: str) -> None:
    """Log once per process: weights are checked before the work and again when they are read."""
    logger.warning("%s", text)
