"""A size in engine bytes: which cache formats and heads compete, which is taken, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention.cache_formats import LLAMA_CPP, VLLM, CacheFormatError, CachePair, cache_options
from attention.engine_cache import engine_cache, with_engine_heads
from attention.plan import AttentionPlan
from attention.ratios import byte_share
from orchestrator import checkpoints
from orchestrator.config.options import ConvertOptions
from orchestrator.config.schema import ConfigError
from orchestrator.conversion.cache_choice import EngineBudget, choose_cache, formats_alone
from orchestrator.conversion.memory_store import MemoryStore
from orchestrator.conversion.short_fits import competing_recipes
from orchestrator.reporting.card import CardFacts
from orchestrator.tasks.convert import Convert

SMALL: dict[str, Any] = {
    "calibration_tokens": 1024,
    "eval_tokens": 512,
    "sequence_length": 128,
    "dtype": "float32",
    "overrides": {"refinement.fit_steps": 12},
}


def options(demo_dir: Path, **changes: Any) -> ConvertOptions:
    return ConvertOptions(**{"model": demo_dir, **SMALL, **changes})


def budget(demo_dir: Path, **changes: Any) -> EngineBudget | None:
    return EngineBudget.of(checkpoints.open_model(demo_dir, "model"), options(demo_dir, **changes))


# ---- what a size leaves room for --------------------------------------------------------------------------------


def test_worked_example() -> None:
    """A quarter of the bytes: q4_0 takes 18 of 64 for a block of 32, so 0.25 * 64 / 18 of the heads fit."""
    plan = AttentionPlan.identity(2, 8, 64)
    result = {option.pair.name: option for option in cache_options(plan, LLAMA_CPP, 0.25)}
    assert list(result) == ["q4_0", "q8_0,q4_0", "q8_0", "f16"]
    assert result["q4_0"].kv_ratio == pytest.approx(0.25 * 64 / 18)
    assert result["q8_0,q4_0"].kv_ratio == pytest.approx(0.25 * 128 / (34 + 18))
    assert result["f16"].kv_ratio == 0.25
    assert [option.pair.name for option in cache_options(plan, VLLM, 0.25)] == ["fp8", "f16"]


def test_layers_that_are_not_converted_take_their_bytes_first(demo_dir: Path) -> None:
    """Half of the bytes are of other layers, which take theirs first, in any format."""
    plan = replace(AttentionPlan.identity(2, 4, 64), other_layers=((4, 64), (4, 64)))
    fp8, f16 = cache_options(plan, VLLM, 0.6)
    assert (fp8.share, fp8.kv_ratio) == (0.5, pytest.approx((0.6 - 0.25) / 0.25))
    assert f16.kv_ratio == pytest.approx(0.2)
    fp8, f16 = cache_options(plan, VLLM, 0.4)
    assert (fp8.kv_ratio, f16.kv_ratio) == (pytest.approx(0.6), pytest.approx(-0.2))
    geometry = checkpoints.open_model(demo_dir, "model").geometry
    others = ((geometry.num_kv_heads, geometry.head_dim),) * geometry.num_layers
    assert byte_share(0.2, geometry) == pytest.approx(0.2)
    assert byte_share(0.2, replace(geometry, other_layers=others)) == pytest.approx(0.6)


def test_formats_alone_know_every_name_of_an_engine(demo_dir: Path) -> None:
    model = checkpoints.open_model(demo_dir, "model")
    for_llama_cpp = [record["cache_format"] for record in formats_alone(model, "gguf")]
    assert for_llama_cpp == ["q8_0", "q8_0,q4_0", "q4_0"]
    assert formats_alone(model, "gguf") == formats_alone(model, "llama.cpp")
    assert [record["cache_format"] for record in formats_alone(model, "vLLM")] == ["fp8"]
    assert formats_alone(model, "hf") == []


@settings(deadline=None)
@given(st.floats(0.01, 0.99), st.sampled_from([32, 48, 64, 128]), st.sampled_from([LLAMA_CPP, VLLM]))
def test_no_option_takes_more_than_the_size(share: float, head_dim: int, engine: str) -> None:
    plan = AttentionPlan.identity(3, 4, head_dim)
    whole = plan.kv_bytes_per_token("float16")
    result = cache_options(plan, engine, share)
    assert result[-1].share == 1  # 16 bits are always there
    for option in result:
        assert option.share * whole == pytest.approx(option.pair.bytes_per_token(plan))
        assert option.kv_ratio * option.share == pytest.approx(share)


def test_a_named_format_that_the_engine_or_the_heads_do_not_have_is_refused() -> None:
    with pytest.raises(CacheFormatError, match="vLLM does not hold a cache in q8_0, llama.cpp does"):
        cache_options(AttentionPlan.identity(1, 4, 64), VLLM, 0.5, CachePair.parse("q8_0"))
    with pytest.raises(CacheFormatError, match="blocks of 32"):
        cache_options(AttentionPlan.identity(1, 4, 48), LLAMA_CPP, 0.5, CachePair.parse("q4_0"))


# ---- options ----------------------------------------------------------------------------------------------------


def test_bytes_for_an_engine_with_formats_are_its_own(demo_dir: Path) -> None:
    result = budget(demo_dir, kv_bytes="0.125", engine="llama.cpp")
    assert result is not None and result.automatic and result.shares == (0.125,)
    assert budget(demo_dir, kv_bytes="0.125") is None
    assert budget(demo_dir, kv_bytes="0.125", engine="transformers") is None
    assert budget(demo_dir, kv_ratio="0.5", engine="llama.cpp") is None


def test_a_named_format_takes_several_sizes(demo_dir: Path) -> None:
    result = budget(demo_dir, kv_bytes="0.4,0.2", cache_format="q8_0")
    assert result is not None and not result.automatic
    assert [option.kv_ratio for option in result.options] == pytest.approx([0.4 * 64 / 34, 0.2 * 64 / 34])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_bytes": "0.125,0.2", "engine": "llama.cpp"}, "one size at a time"),
        ({"kv_bytes": "0.5", "cache_format": "auto"}, "--kv-bytes and --for llama.cpp or vllm"),
        ({"kv_ratio": "0.5", "engine": "vllm", "cache_format": "auto"}, "--kv-bytes and --for"),
        ({"kv_bytes": "0.6", "cache_format": "q8_0"}, "nothing to convert.*--cache-type-k q8_0"),
        ({"kv_bytes": "0.5", "cache_format": "fp8", "engine": "llama.cpp"}, "does not hold a cache in fp8"),
        ({"kv_bytes": "0.125", "engine": "llama.cpp", "layerwise": True}, "layer by layer"),
        ({"kv_ratio": "0.5", "cache_format": "q8_0", "engine": "vllm"}, "does not hold a cache in q8_0"),
        ({"kv_ratio": "0.25", "kv_bytes": "0.5", "engine": "llama.cpp"}, "expected one of"),
        ({"kv_heads": "1", "kv_bytes": "0.5", "engine": "vllm"}, "expected one of"),
    ],
)
def test_what_does_not_go_together_is_refused(demo_dir: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        budget(demo_dir, **changes)


def test_wide_heads_compete_where_the_recipe_is_left_open(demo_dir: Path) -> None:
    def names(**changes: Any) -> list[str]:
        task = Convert(options(demo_dir, kv_bytes="0.125", engine="llama.cpp", **changes))
        return [one.name for one in competing_recipes(task.request.checkpoint, task.request.recipe, task.options)]

    assert names() == ["headfold_layers", "headfold_wide"]
    assert names(recipe="headfold_gqa") == ["headfold_gqa"]


def expected(one: Any) -> float:
    """With a full fit: half of what the heads lose after a short one, and what the format adds."""
    return one["loss_increase"] - 0.5 * (one["heads_loss_increase"] or 0.0)


# ---- the choice -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task(demo_dir: Path) -> Convert:
    return Convert(options(demo_dir, kv_bytes="0.125", engine="llama.cpp", recipe="headfold_gqa"))


@pytest.fixture(scope="module")
def store(task: Convert) -> MemoryStore:
    return MemoryStore(task.request, always_calibrate=True)


def test_the_combination_of_least_loss_is_taken(task: Convert, store: MemoryStore) -> None:
    assert task.budget is not None
    choice = choose_cache(store, task.budget.options, [task.request.recipe])
    tried = [one for one in choice.combinations if one["loss_increase"] is not None]
    best = min(tried, key=expected)
    assert (best["cache_format"], best["recipe"]) == (choice.option.pair.name, "headfold_gqa")
    for one in choice.combinations:  # what was left out keeps fewer heads than what already lost more
        if one["loss_increase"] is None:
            more = [other for other in tried if other["kv_ratio"] > one["kv_ratio"]]
            assert any(0.5 * (other["heads_loss_increase"] or 0) >= expected(best) for other in more)
    assert len({one["kv_ratio"] for one in choice.combinations}) == len(choice.combinations)


def test_a_format_that_holds_all_heads_competes_without_a_conversion(task: Convert, store: MemoryStore) -> None:
    plan = store.request.checkpoint.plan
    choice = choose_cache(store, cache_options(plan, LLAMA_CPP, 0.5), [task.request.recipe])
    assert choice.recipe is None and choice.combinations[0]["recipe"] is None
    assert choice.option.pair.name == "q8_0,q4_0"  # of those that hold all heads that of most bytes
    assert choice.combinations[0]["heads_loss_increase"] is None


@pytest.mark.extended
def test_the_result_is_measured_in_its_format_and_noted(demo_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    record: Any = Convert(
        options(demo_dir, kv_bytes="0.125", engine="llama.cpp", recipe="headfold_wide", out=out)
    ).run()
    cached = record["engine_cache"]
    assert cached["share"] <= 0.125 and cached["engines"] == ["llama.cpp"]
    assert cached["kv_bytes_per_token"] == cached["share"] * 4096
    chosen = [one for one in record["combinations"] if one["cache_format"] == cached["cache_format"]]
    assert chosen and record["recipe"]["name"] == "headfold_wide"
    assert CardFacts.of(out).cache_format == cached["cache_format"]  # an export's card has its flags
    model = with_engine_heads(checkpoints.load_working(checkpoints.open_model(out, "model"), "float32", "cpu"))
    tokens = torch.randint(2048, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), engine_cache(model, CachePair.parse(cached["cache_format"])):
        rounded = model(tokens).logits
    assert (rounded - model(tokens).logits).abs().max() > 1e-3
