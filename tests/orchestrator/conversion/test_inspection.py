"""inspect: what is measured, what is read from the cache, and a page that stands alone."""

from __future__ import annotations

import copy
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_inspection import made_up_inspection
from safetensors.torch import load_file
from verbs import convert_checkpoint, inspect_checkpoint

from attention.conversion.refinement.local import FIT_STEPS
from attention.plan import AttentionPlan
from orchestrator.config.options import InspectOptions
from orchestrator.reporting.figures import drawing, inspection
from orchestrator.reporting.inspection_tables import (
    RECIPE_COLUMNS,
    lead,
    next_step,
    print_inspection,
    recipe_table,
)
from orchestrator.reporting.pages.inspection_page import build_page
from orchestrator.tasks.inspect import Inspect
from search_spaces.planning.context import PlanningContext

SMALL: dict[str, Any] = {
    "kv_ratios": [0.5, 0.3],
    "compare": ["gqa", "mqa", "headfold_gqa"],
    "counts": "divisors",
    "recipe_settings": {"allocation.tokens": 256, "allocation.fit_steps": 0},
    "calibration_tokens": 1024,
    "eval_tokens": 1024,
    "sequence_length": 128,
    "device": "cpu",
}


@pytest.fixture(scope="module", autouse=True)
def texts(little_text: str) -> None:
    SMALL.update(calibration_data=little_text, eval_data=little_text)


@pytest.mark.extended
def test_the_report_of_the_demo_checkpoint(
    demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SMALL["recipe_settings"] | {"refinement.fit_steps": 24}
    record = inspect_checkpoint(demo_dir, cache_dir=tmp_path, **SMALL | {"recipe_settings": settings})
    assert json.loads(json.dumps(record)) == record
    made_up = made_up_inspection(4, 8)  # for the tests of the page
    assert record.keys() == made_up.keys() and record["budgets"][0].keys() == made_up["budgets"][0].keys()
    for entry in record["recipes"]:
        assert entry.keys() == made_up["recipes"]["fit_steps" in entry].keys()
    keys, values = ({layer["layer"]: layer[side] for layer in record["sensitivity"]} for side in ("key", "value"))
    assert all(set(curve) >= {"1", "2", "4"} for curve in (*keys.values(), *values.values()))
    assert keys[0]["1"] > 0.2 and keys[0]["1"] > 10 * max(values[layer]["1"] for layer in range(4))
    # 0.3 is no whole number of heads: the largest budget below it is laid out.
    assert [(b["kv_ratio_asked"], b["kv_ratio"]) for b in record["budgets"]] == [(0.5, 0.5), (0.3, 19 / 64)]
    for budget in record["budgets"]:
        assert AttentionPlan.from_json(json.dumps(budget["plan"])).kv_ratio == budget["kv_ratio"]
        assert sum(budget["key"]) > sum(budget["value"])
    result = {(e["recipe"], e["kv_ratio_asked"]): e for e in record["recipes"]}
    assert result["gqa", 0.5]["loss_increase"] > 1
    formats = {entry["cache_format"]: entry for entry in record["cache_formats"]}
    assert [entry["share"] for entry in formats.values()] == [17 / 32, 0.5, 13 / 32, 9 / 32]
    assert abs(formats["q8_0"]["loss_increase"]) < 0.003 and 0 != abs(formats["q4_0"]["loss_increase"]) < 0.1
    assert formats["q8_0"]["loss_increase_stderr"] < formats["q4_0"]["loss_increase_stderr"], "it moves losses less"
    assert lead(record).startswith("50% without any conversion: a cache in q8_0 (llama.cpp) has 53.12% of the bytes")
    assert (result["gqa", 0.3]["kv_ratio"], result["mqa", 0.5]["kv_ratio"]) == (0.25, 0.125)
    for requested in (0.5, 0.3):
        fitted = result["headfold_gqa", requested]
        assert (fitted["fit_steps"], fitted["fit_steps_of_convert"]) == (24, FIT_STEPS)
        assert fitted["loss_increase"] < result["gqa", requested]["loss_increase"] / 4
    texts = {name: SMALL[name] for name in SMALL if name not in ("kv_ratios", "compare", "counts")}
    same = convert_checkpoint(
        demo_dir, "headfold_gqa", 0.5, **texts | {"recipe_settings": {"refinement.fit_steps": 24}}
    )
    assert result["headfold_gqa", 0.5]["loss"] == pytest.approx(same["loss"], abs=1e-5), "convert gives what is shown"
    assert not any("fit_steps" in entry for (name, _), entry in result.items() if name != "headfold_gqa")
    for layer in record["similarity"]:
        for side in ("key", "value"):
            raw, aligned = (np.array(layer[side][kind]) for kind in ("raw", "aligned"))
            assert raw.shape == (8, 8) and (aligned >= raw - 1e-3).all() and aligned.mean() > raw.mean() + 0.1
    model = load_file(demo_dir / "model.safetensors")
    for layer, result in enumerate(record["redundancy"]):
        for side, letter in (("query", "q"), ("key", "k"), ("value", "v")):
            heads = model[f"model.layers.{layer}.self_attn.{letter}_proj.weight"].double().view(8, -1, 256).numpy()
            assert result[side] == pytest.approx(slow_cka(heads), abs=1e-9)

    averaged = inspect_checkpoint(demo_dir, cache_dir=tmp_path, **SMALL | {"recipe": "gqa", "compare": ["gqa"]})
    expected = [entry["loss"] for entry in record["recipes"] if entry["recipe"] == "gqa"]
    shown = [entry["loss"] for entry in averaged["recipes"]]
    assert shown == pytest.approx(expected, abs=1e-5), "not the head counts that were laid out for the page"

    page = build_page(record)
    assert "keys of layer 0" in page and "Redundancy of each layer" in page and "stdlib-llama" in page
    print_inspection(record)
    output = capsys.readouterr().out
    assert "Loss increase" in output and f"{keys[0]['1']:+.3f}" in output

    def again(*_: object, **__: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(PlanningContext, "increases_of", again)
    second = inspect_checkpoint(demo_dir, cache_dir=tmp_path, **SMALL | {"compare": ["gqa"]})
    for name in ("sensitivity", "budgets", "similarity"):
        assert second[name] == record[name]


def test_the_command_that_it_advises_has_its_options_on_model_and_text() -> None:
    options = InspectOptions(checkpoint="model", calibration_data="d.jsonl", dequantize=True, text_field="content")
    entry = {"recipe": "gqa", "kv_ratio_asked": 0.5, "loss_increase": 1.0}
    record = {"model": "model", "calibration_data": "d.jsonl", "budgets": [entry], "recipes": [entry]}
    command = next_step({**record, "options": Inspect(options).model_and_text_options})
    expected = "--data d.jsonl --dequantize --text-field content --out model-kv"
    assert command == f"headfold convert --model model --recipe gqa --kv-ratio 0.5 {expected}"


def slow_cka(heads: np.ndarray) -> float:
    """The mean linear CKA of pairs of weights `[H, d, D]` by its definition, rows of the model's dims."""
    pairs = []
    for i, j in itertools.permutations(range(len(heads)), 2):
        x, y = heads[i].T, heads[j].T
        cross = np.linalg.norm(x.T @ y, "fro") ** 2
        pairs.append(cross / (np.linalg.norm(x.T @ x, "fro") * np.linalg.norm(y.T @ y, "fro")))
    return float(np.mean(pairs))


@pytest.mark.extended
def test_local_costs_rank_groups_as_the_loss_does(demo_dir: Path) -> None:
    record = inspect_checkpoint(demo_dir, agreement=True, **SMALL)
    assert np.mean([site["spearman"] for site in record["agreement"] if site["side"] == "key"]) > 0.5


def test_mistakes_are_found_before_the_model_is_loaded(demo_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"kv_ratios": []}, "at least one"),
        ({"kv_ratios": [0.5, 0.01]}, "keeps at least 12.5% on this checkpoint, got 1%"),
        ({"recipe": "hedfold"}, "hedfold"),
        ({"compare": ["gqq"]}, "gqq"),
        ({"counts": "few"}, "few"),
        ({"sequence_length": 9999}, "9999"),
    ]
    for wrong, output in mistakes:
        with pytest.raises(ValueError, match=output):
            inspect_checkpoint(demo_dir, **wrong)
    assert capfd.readouterr() == ("", ""), "loading and calibrating show how far they are"


# ---- the page -----------------------------------------------------------------------------------------------------


class Balanced(HTMLParser):
    """Tags that are not closed, and the text."""

    EMPTY = frozenset({"meta", "br", "path", "use", "rect", "image"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open += [tag] if tag not in self.EMPTY else []

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(("layers", "heads"), [(4, 8), (32, 32), (1, 2)])
def test_the_page_stands_alone_at_any_size(layers: int, heads: int) -> None:
    page = build_page(made_up_inspection(layers, heads))
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert len(page.encode()) < 3_000_000
    assert page.count("<script") == 1 and "<b>name</b>" not in page
    assert not re.search(r"(?:src|href)=\"https?:", page)
    for heading in ("Where the loss is sensitive", "Heads kept", "Similar heads", "Loss increase of each recipe"):
        assert heading in parser.text
    assert parser.text.count("not possible") >= 1
    assert ("8 of 32 layers are drawn" in parser.text) == (layers == 32)


def test_the_headline_reports_how_long_layers_were_fitted() -> None:
    record = made_up_inspection(4, 8)
    assert "-0.001 ± 0.002 by headfold, refined in 720 steps per layer." in lead(record)
    record["recipes"][1]["fit_steps"] = 120  # by refinement.fit_steps
    assert "-0.001 ± 0.002 by headfold, refined in 120 steps per layer (convert takes 720)." in lead(record)
    rows = {row[0]: row for row in recipe_table(record).rows}
    increase, steps = (RECIPE_COLUMNS.index(name) for name in ("loss increase", "fit steps per layer"))
    assert (rows["headfold"][increase], rows["headfold"][steps]) == ("-0.001 ± 0.002", "120")
    assert (rows["gqa"][increase], rows["gqa"][steps]) == ("+5.300 ± 0.002", "-")
    assert rows["odd"][2] == "not possible" and len(rows["odd"]) == len(RECIPE_COLUMNS)


def test_numbers_stand_in_the_cells_of_small_models_only() -> None:
    record = made_up_inspection(4, 8)
    record["sensitivity"][0]["key"] = {"1": 1.8349, "2": 0.2345, "4": 0.0042}
    drawn = drawing.svg(inspection.sensitivity_figure(record), "a map")
    assert all(f"<!-- {cell} -->" in drawn for cell in ("1.8", ".23", ".004"))
    deep = copy.deepcopy(record)
    deep["sensitivity"] = [record["sensitivity"][0] | {"layer": i} for i in range(40)]
    assert "<!-- .004 -->" not in drawing.svg(inspection.sensitivity_figure(deep), "a map")


def test_nothing_converted_leaves_the_picture_out() -> None:
    record = made_up_inspection(4, 8)
    record["recipes"] = record["recipes"][2:]
    assert inspection.recipes_figure(record) is None
    assert "What each recipe costs" not in build_page(record)
