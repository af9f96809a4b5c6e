"""Promoted models: the order in which they are reported, the software that serves them, and whether the report is
true."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_plans import converted, plans
from finished_search import ORIGINAL, finished_search
from transformers import PreTrainedModel
from verbs import export_checkpoint

from attention.io import checkpoint
from orchestrator.promotion.state import PromoteOutcome
from orchestrator.reporting.console import print_ending
from orchestrator.reporting.pages.model_sections import sequences_that_fit
from orchestrator.reporting.pages.report_page import write_report
from orchestrator.reporting.promoted_models import engine_services, promoted_models
from orchestrator.search.outcome import SearchOutcome
from orchestrator.storage.json_files import read_json

HEAD_DIM = 32
PLANS = plans(HEAD_DIM)
Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(
    tiny_model: Callable[..., PreTrainedModel], demo_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Saved:
    """`saved(kind, family)`: a model, by default a Llama, with a plan of that kind."""

    def save(kind: str, family: str = "llama") -> Path:
        settings: dict[str, Any] = {"vocab_size": 2064, "hidden_size": 4 * HEAD_DIM, "head_dim": HEAD_DIM}
        model = converted(tiny_model(family, **settings, bos_token_id=0, eos_token_id=0), PLANS[kind])
        return checkpoint.save(model, tmp_path_factory.mktemp("promoted") / "with space" / "headfold", demo_dir)

    return save


def test_heads_of_a_qwen2_that_vllm_reads_with_code_are_served_with_it(saved: Saved) -> None:
    ways = {way["engine"]: way for way in engine_services(saved("unequal", "qwen2"))}
    export, start = ways["vLLM"]["commands"]
    assert "--target vllm" in export and start.endswith("--trust-remote-code")


@pytest.mark.parametrize(
    ("kind", "servers"),
    [("uniform", {"vLLM", "llama.cpp"}), ("layers", {"vLLM", "llama.cpp"}), ("apart", set()), ("composed", set())],
)
def test_the_reported_commands_can_be_run(saved: Saved, kind: str, servers: set[str]) -> None:
    model = saved(kind)
    ways = {way["engine"]: way for way in engine_services(model)}
    assert {name for name, way in ways.items() if "commands" in way} == servers | {"transformers"}
    assert all(way.get("why_not") for way in ways.values() if "commands" not in way)
    for engine, way in ways.items():
        if "commands" not in way:
            continue
        verb, start = way["commands"] if way["target"] else ("", way["commands"][0])
        if not verb:  # a stock folder, which is saved for stock plans
            assert kind == "uniform" and str(model) in start and "trust" not in start
            continue
        words = shlex.split(verb)
        assert words[:2] == ["headfold", "export"]
        options = dict(zip(words[3::2], words[4::2], strict=True))
        exported = export_checkpoint(words[2], options["--target"], options["--out"])
        assert (
            exported["kv_bytes_per_token_after"] == way["kv_bytes_per_token"] == exported["kv_bytes_per_token_before"]
        )
        assert engine in exported["engines"]
        own_code = any(Path(options["--out"]).glob("*.py"))
        if engine == "llama.cpp":
            assert Path(shlex.split(start)[-1]).is_file()
        else:
            assert ("trust" in start) == own_code and options["--out"] in start


def test_a_stock_folder_is_served_as_it_is(demo_dir: Path) -> None:
    ways = {way["engine"]: way for way in engine_services(demo_dir)}
    assert ways["vLLM"]["commands"] == [f"vllm serve {shlex.quote(str(demo_dir))}"]
    assert len(ways["llama.cpp"]["commands"]) == 2  # which reads a separate file
    assert {way["kv_bytes_per_token"] for way in ways.values()} == {4096}
    assert engine_services(demo_dir / "nowhere") == []


def test_what_was_exported_for_the_engine_of_the_search_is_not_exported_again(saved: Saved) -> None:
    model = saved("layers")
    served = model.parent / "served"
    export_checkpoint(model, "vllm", served)
    ways = {way["engine"]: way for way in engine_services(model, served)}
    assert ways["vLLM"]["commands"] == [f"vllm serve {shlex.quote(str(served))} --trust-remote-code"]
    assert ways["llama.cpp"]["commands"][0].startswith("headfold export")


def test_what_was_exported_for_transformers_is_loaded_by_it(saved: Saved) -> None:
    """A plan that no stock model has, with its code in the folder."""
    model = saved("apart")
    served = model.parent / "served"
    export_checkpoint(model, "transformers", served)
    ways = {way["engine"]: way for way in engine_services(model, served)}
    assert "why_not" not in ways["transformers"]
    assert not any(command.startswith("headfold export") for command in ways["transformers"]["commands"])


@pytest.mark.heavy
def test_the_smallest_cache_comes_first_on_screen_page_and_in_json(
    tmp_path: Path, demo_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = finished_search(tmp_path, demo_dir)
    promotion = read_json(search.promotion)
    models = promoted_models(promotion)
    assert [m["trial_id"] for m in models] == ["t0003", "t0002"]
    assert models[0]["loss_increase"] == pytest.approx(0.052) and models[0]["perplexity"] == pytest.approx(
        math.exp(2.271)
    )
    print_ending(promotion, [], search.root, str(search.report))
    assert capsys.readouterr().out.splitlines() == [
        f"promoted {demo_dir}  (25% of the KV cache, loss +0.052, headfold_gqa)",
        f"promoted {demo_dir}  (50% of the KV cache, loss -0.009, headfold_gqa)",
        f"serve    vllm serve {demo_dir}",
        f"report   {search.report}",
        f"MLflow   headfold ui {search.root}",
    ]
    outcome = SearchOutcome(search.root, "", ORIGINAL, [], "gqa", promotion)
    assert outcome.to_dict()["promoted"] == models
    assert PromoteOutcome(search.root, promotion, ("t0003",)).to_dict()["promoted"] == models
    page = Path(write_report(search.root)["report"]).read_text()
    heads = (f'id="promoted-headfold-gqa-{share}-of-the-kv-cache-{place}"' for place, share in ((3, 25), (4, 50)))
    first, second = (page.index(head) for head in heads)
    assert first < second < page.index("Trials and measurements</h2>")
    for shown in (">2.271<", f">{math.exp(2.271):.2f}<", ">1,024<", "0.594 ± 0.062", "def read_lines(path):"):
        assert shown in page[first:second]


def test_sequences_that_fit_are_whole_and_leave_room_for_the_weights() -> None:
    assert sequences_that_fit(10_000, 1_000, 2, 500) == 9
    assert sequences_that_fit(10_000, 1_001, 2, 500) == 8
    assert sequences_that_fit(1_000, 2_000, 2, 500) == 0
