"""The verbs that take a device, on an emulated GPU: no tensor is on the wrong device, and records and weights are those
of the CPU. `--device auto` takes a GPU wherever there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_device import is_emulated
from parameters import extended
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedTokenizerBase
from verbs import convert_checkpoint, convert_layerwise, evaluate_checkpoint, export_checkpoint, inspect_checkpoint

from attention.families import families
from attention.io import checkpoint
from orchestrator import checkpoints
from search_spaces.recipes.catalogue import RECIPES
from trainers import zero

GPU = "fgpu:0"
SMALL: dict[str, Any] = {
    "eval_tokens": 192,
    "sequence_length": 48,
    "dtype": "float32",
}  # a GPU works in it, the CPU in 32 bits
CALIBRATED: dict[str, Any] = SMALL | {"calibration_tokens": 384}
FEW = {"refinement.fit_steps": 4, "allocation.tokens": 192, "grouping.iterations": 40}
NOT_OF_RESULTS = ("seconds", "time", "memory", "out", "path", "date", "device", "command", "digest", "checkpoint")


@pytest.fixture(scope="module", autouse=True)
def texts(little_text: str) -> None:
    SMALL["eval_data"] = little_text
    CALIBRATED.update(calibration_data=little_text, eval_data=little_text)


@pytest.fixture(scope="module")
def source(tiny_model: Any, demo_tokenizer: PreTrainedTokenizerBase, tmp_path_factory: Any) -> Callable[[str], Path]:
    """A tiny checkpoint of a family with the demo's tokenizer."""
    created: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in created:
            created[family] = tmp_path_factory.mktemp(family)
            tiny_model(family, vocab_size=2048).save_pretrained(created[family])
            demo_tokenizer.save_pretrained(created[family])
        return created[family]

    return of


@pytest.fixture(autouse=True)
def gpu(fgpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The product knows auto, cpu and cuda; here the emulated device is what `device_of` finds by its name.

    DeepSpeed does not know it: DHA's search phase, which is its training, is on the CPU.
    """
    real, deepspeed_on = checkpoints.device_of, zero.computing_on
    monkeypatch.setattr(checkpoints, "device_of", lambda name: fgpu if is_emulated(name) else real(name))
    monkeypatch.setattr(zero, "computing_on", lambda device: deepspeed_on("cpu"))
    with sdpa_kernel(SDPBackend.MATH):  # as the emulated GPU does it
        yield fgpu


def numbers(record: Any, name: str = "") -> dict[str, Any]:
    """The leaves of a record by their path, but for words, times, places and what else is of a run."""
    if isinstance(record, Mapping):
        parts = [(f"{name}.{key}", value) for key, value in record.items()]
    elif isinstance(record, (list, tuple)):
        parts = [(f"{name}.{index}", value) for index, value in enumerate(record)]
    else:
        return {} if isinstance(record, str) else {name: record}
    parts = [(key, value) for key, value in parts if not any(word in key for word in NOT_OF_RESULTS)]
    return {path: leaf for key, value in parts for path, leaf in numbers(value, key).items()}


def assert_same(result: Any, expected: Any) -> None:
    remaining, right = numbers(result), numbers(expected)
    assert remaining.keys() == right.keys() and len(remaining) > 3
    for path, value in right.items():
        close = pytest.approx(value, rel=1e-3, abs=1e-4) if isinstance(value, float) else value
        assert remaining[path] == close, path


def assert_same_weights(one: Path, other: Path) -> None:
    weights = [checkpoint.load(folder).state_dict() for folder in (one, other)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=1e-4, rtol=1e-3)


def knobs_of(name: str) -> dict[str, Any]:
    """Few steps of everything that a recipe does by steps; `relaxation`, which trains, is left out."""
    settings = dict(RECIPES[name].settings)
    short = {key: value for key, value in FEW.items() if key in settings}
    return short | ({} if RECIPES[name].relaxation == "none" else {"relaxation": "none"})


def converted(convert: Any, source: Path, name: str, out: Path, device: str) -> Any:
    ratio = 1.0 if RECIPES[name].sharing != "none" else 0.25
    return convert(source, name, ratio, out, recipe_settings=knobs_of(name), device=device, **CALIBRATED)


FAST = ("asymgqa",)
IN_MEMORY = [
    pytest.param(name, id=name) if name in FAST else extended(name, id=name)
    for name in RECIPES
    if RECIPES[name].sharing != "post"  # which does nothing without its training
]


@pytest.mark.parametrize("name", IN_MEMORY)
def test_convert(name: str, source: Any, tmp_path: Path) -> None:
    result, expected = (
        converted(convert_checkpoint, source("llama"), name, tmp_path / device[:4], device) for device in (GPU, "cpu")
    )
    assert_same(result, expected)
    assert_same_weights(tmp_path / "fgpu", tmp_path / "cpu")


@pytest.mark.parametrize("name", ["gqa", "headfold", "headfold_gqa"])
@pytest.mark.extended
@pytest.mark.parametrize("family", sorted(set(families()) - {"gemma4_text"}))  # which is converted in memory alone
def test_convert_layer_by_layer(name: str, family: str, source: Any, tmp_path: Path) -> None:
    result, expected = (
        converted(convert_layerwise, source(family), name, tmp_path / device[:4], device) for device in (GPU, "cpu")
    )
    assert_same(result, expected)
    assert_same_weights(tmp_path / "fgpu", tmp_path / "cpu")


@pytest.mark.extended
@pytest.mark.parametrize("family", sorted(families()))
def test_inspect(family: str, source: Any) -> None:
    settings = CALIBRATED | {"kv_ratios": (0.5,), "recipe_settings": {"refinement.fit_steps": 4}}
    result, expected = (inspect_checkpoint(source(family), device=device, **settings) for device in (GPU, "cpu"))
    assert_same(result, expected)


@pytest.mark.extended
def test_evaluate(source: Any, tmp_path: Path) -> None:
    """With an original, and with the lines that are hidden in contexts."""
    created = tmp_path / "model"
    converted(convert_checkpoint, source("llama"), "gqa", created, "cpu")
    settings = SMALL | {"context_lengths": "64", "speed_tokens": 0}
    result, expected = (
        evaluate_checkpoint(created, source("llama"), device=device, **settings) for device in (GPU, "cpu")
    )
    assert_same(result, expected)


@pytest.mark.extended
def test_export(source: Any, tmp_path: Path, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no device option: it converts and compares on the CPU, also where there is a GPU."""
    converted(convert_checkpoint, source("llama"), "gqa", tmp_path / "model", "cpu")
    real = checkpoints.device_of
    monkeypatch.setattr(checkpoints, "device_of", lambda name: gpu if name == "auto" else real(name))
    report = export_checkpoint(tmp_path / "model", "gqa", tmp_path / "out")
    assert report["exact"]
