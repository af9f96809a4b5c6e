"""Arguments that a caller from Python may pass by mistake instead of a path: refused by their type, before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verbs import (
    convert_checkpoint,
    convert_curve,
    estimate_conversion,
    evaluate_checkpoint,
    export_checkpoint,
    finetune_checkpoint,
    inspect_checkpoint,
    train_from_scratch,
)

from trainers.text.corpora import resolve

DEMO = Path(__file__).resolve().parents[3] / "examples" / "stdlib-llama"
TRAINING: dict[str, Any] = {"steps": 2, "learning_rate": 1e-3}
DOORS: dict[str, Callable[[Any, Path], Any]] = {
    "convert": lambda model, out: convert_checkpoint(model, "gqa", 0.5),
    "convert to a folder": lambda model, out: convert_checkpoint(model, "gqa", 0.5, out),
    "convert layer by layer": lambda model, out: convert_checkpoint(model, "gqa", 0.5, out, layerwise=True),
    "convert where it fits": lambda model, out: convert_checkpoint(model, "gqa", 0.5, out, layerwise=None),
    "convert at several ratios": lambda model, out: convert_curve(model, "gqa", [0.5, 0.25]),
    "estimate": lambda model, out: estimate_conversion(model, "gqa", 0.5),
    "inspect": lambda model, out: inspect_checkpoint(model),
    "evaluate": lambda model, out: evaluate_checkpoint(model),
    "evaluate beside": lambda model, out: evaluate_checkpoint("none", model),
    "export": lambda model, out: export_checkpoint(model, "gqa", out),
    "finetune": lambda model, out: finetune_checkpoint(model, out, **TRAINING),
    "finetune beside": lambda model, out: finetune_checkpoint("none", out, original=model, **TRAINING),
    "train": lambda model, out: train_from_scratch(model, out, **TRAINING),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_loaded_model_in_the_place_of_a_path_is_named_by_its_type(
    door: str, tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=r"expected the path of a checkpoint .*got LlamaForCausalLM; .*save_pretrained"):
        DOORS[door](tiny_model("llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("texts", [["a", "b"], ("a",), {"text": "a"}, None], ids=lambda texts: type(texts).__name__)
def test_texts_in_the_place_of_their_source_are_named_by_their_type(texts: Any) -> None:
    with pytest.raises(TypeError, match=rf"data: expected the name of a source .*got {type(texts).__name__}; .*jsonl"):
        resolve(texts)


def test_a_list_of_texts_is_refused_by_a_conversion() -> None:
    texts: Any = ["a text"]
    with pytest.raises(TypeError, match=r"data: expected the name of a source of text .*got list"):
        convert_checkpoint(DEMO, "least_squares", 0.5, calibration_data=texts, calibration_tokens=512)
