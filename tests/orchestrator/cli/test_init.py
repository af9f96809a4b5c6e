"""`headfold init`: a first configuration that passes all checks, made of what config.json says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_here

from attention.families import geometry_of
from attention.geometry import HeadGeometry
from attention.io import checkpoint
from orchestrator.config.compared import ComparisonConfig
from orchestrator.config.first import FirstConfig, Hardware
from orchestrator.config.parsing import ConfigError, read_yaml
from orchestrator.config.schema import SearchConfig, parse_config, read_search_config
from orchestrator.resources.disk import Storage
from orchestrator.search.candidates import named_candidates
from orchestrator.search.estimate import storage_of
from orchestrator.search.setup import SearchSetup

GIGA = 2**30
LAPTOP, ONE_GPU, NODE = Hardware(0, 80 * GIGA, 8), Hardware(1, 24 * GIGA, 16), Hardware(8, 80 * GIGA, 64)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def demo_geometry(demo_dir: Path) -> HeadGeometry:
    return geometry_of(checkpoint.load_config(demo_dir))


@pytest.mark.parametrize("name", ["2024", "2024-31-12", "0x_", "null", "1e3", "-x", "out/3", "it's"])
def test_a_name_stays_a_name_in_yaml(name: str) -> None:
    assert read_yaml(f"name: {FirstConfig.quoted(name)}") == {"name": name}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("family", "kv_heads", "ratios", "recipes"), [("llama", 4, [0.5, 0.25], 4), ("qwen3", 2, [0.5], 3)]
)
def test_the_result_passes_a_dry_run(
    family: str,
    kv_heads: int,
    ratios: list[float],
    recipes: int,
    place: Path,
    tiny_model: Any,
    demo_tokenizer: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = place / f"Tiny {family}"
    tiny_model(family, vocab_size=2048, num_key_value_heads=kv_heads).save_pretrained(model)
    demo_tokenizer.save_pretrained(model)
    assert run_here("init", model.name) == 0
    file = place / f"tiny-{family}.yaml"
    brief = place / f"tiny-{family}-smoke.yaml"
    assert f"wrote {file.name} and {brief.name}" in capsys.readouterr().out
    assert run_here("search", brief, "--dry-run") == 0
    assert "trials: 2;" in capsys.readouterr().out
    assert run_here("search", file, "--dry-run") == 0
    output, warnings = capsys.readouterr()
    assert "relaxation" not in warnings, "the steps are enough for align"
    # each recipe at 2 rates at each ratio, and 4 that are drawn
    assert f"trials: {recipes * 2 * len(ratios) + 4};" in output and output.endswith("nothing was written\n")
    config = parse_config(read_yaml(file.read_text()))
    assert config.search.kv_ratios == ratios and config.model.path == model.name
    assert sorted(path.name for path in place.iterdir()) == [model.name, brief.name, file.name]
    assert run_here("init", model.name) == 2
    assert "exists; name another file with --out" in capsys.readouterr().err


@pytest.mark.heavy
def test_a_comparison_passes_a_dry_run_with_every_arm_at_its_best(
    place: Path, tiny_model: Any, demo_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("llama", vocab_size=2048, num_key_value_heads=4).save_pretrained(place / "model")
    demo_tokenizer.save_pretrained(place / "model")
    assert run_here("init", "model", "--compare", "asymgqa,dha,align,headfold_gqa") == 0
    file = place / "model-compared.yaml"
    for brief in (file, place / "model-compared-smoke.yaml"):
        assert run_here("search", brief, "--dry-run") == 0
        assert "relaxation" not in capsys.readouterr().err, "the steps let relaxations come to their end"
    config = read_search_config(file, [])
    assert arms(config) == [
        *("gqa", "asymgqa", "dha", "align", "headfold_gqa"),
        *("gqa_refined", "asymgqa_refined", "dha_refined", "align_refined"),
    ]
    assert (config.search.searcher, config.rungs.stop, config.promotion.enabled) == ("grid", False, False)
    assert config.seeds == [0, 1, 2]
    geometry = geometry_of(checkpoint.load_config(place / "model"))
    candidates = named_candidates(config, geometry)
    rates = {name: sorted({c.learning_rate for c in candidates if c.recipe.name == name}) for name in arms(config)}
    # What begins near the original's loss has lower rates, and none is judged at one alone
    for name, found_rates in rates.items():
        fitted = name.endswith("_refined") or name == "headfold_gqa"
        assert found_rates == ([1e-4, 3e-4] if fitted else [3e-4, 1e-3])
    assert len(candidates) == 9 * 2 * 2 * 3
    # All but align learn from the same: a fit does not take over what a relaxation needs
    trained = {c.recipe.name for c in candidates if c.recipe.apply("recovery")}
    assert trained == {"align"}


def test_rates_of_a_comparison_fall_with_size_and_relaxations_need_room(demo_geometry: HeadGeometry) -> None:
    def compared(parameters: float, hardware: Hardware, *recipes: str) -> SearchConfig:
        created = ComparisonConfig(
            "m", demo_geometry, "float32", int(parameters), "texts", hardware, "s", recipes=recipes
        )
        return parse_config(yaml.safe_load(created.text()))

    highest = [max(compared(size, NODE, "asymgqa").learning_rates) for size in (4e6, 1e8, 7e9)]
    assert highest == sorted(highest, reverse=True) and len(set(highest)) == 3
    assert arms(compared(7e9, NODE, "dha")) == ["gqa", "dha", "gqa_refined", "dha_refined"]
    assert arms(compared(7e9, ONE_GPU, "asymgqa")) == ["gqa", "asymgqa", "gqa_refined", "asymgqa_refined"]
    with pytest.raises(ConfigError, match="--compare: dha: a relaxation trains all weights.*do not fit 24 GiB"):
        compared(7e9, ONE_GPU, "asymgqa", "dha")


def test_what_shares_weights_is_compared_at_the_whole_cache_and_is_not_refined(demo_geometry: HeadGeometry) -> None:
    names = ("postshare", "directshare")
    created = ComparisonConfig("m", demo_geometry, "float32", 4_000_000, "texts", LAPTOP, "s", recipes=names)
    config = parse_config(yaml.safe_load(created.text()))
    assert arms(config) == ["gqa", *names, "gqa_refined"]
    assert [(arm.name, arm.kv_ratios) for arm in config.search.recipes if arm.kv_ratios] == [
        (name, [1.0]) for name in names
    ]


def test_a_checkpoint_may_be_called_by_its_step(place: Path, demo_dir: Path, capfd: Any) -> None:
    shutil.copytree(demo_dir, place / "1000")
    assert run_here("init", "1000", "--out", "-") == 0
    config = parse_config(read_yaml(capfd.readouterr().out))
    assert (config.name, config.promotion.registered_name) == ("1000", "1000")


def test_the_first_line_names_a_schema_that_is_there(place: Path, demo_dir: Path, capfd: Any) -> None:
    assert run_here("init", demo_dir, "--out", "-") == 0
    written = capfd.readouterr().out
    schema = Path(written.splitlines()[0].partition("$schema=")[2])
    assert json.loads(schema.read_text())["title"] == "Headfold search"
    assert list(place.iterdir()) == []


def first(
    kv_heads: int, parameters: float, hardware: Hardware, demo: HeadGeometry, source: str = "texts", **kind: Any
) -> SearchConfig:
    """The configuration of a model of 12 query heads, read back."""
    geometry = replace(demo, num_heads=12, num_kv_heads=kv_heads, max_positions=32_768)
    created = FirstConfig(
        "org/Some Model-7B", geometry, "bfloat16", int(parameters), source, hardware, "s.json", **kind
    )
    return parse_config(yaml.safe_load(created.text()))


@pytest.mark.parametrize(
    ("kv_heads", "ratios", "counts"),
    [(12, [0.5, 0.25], []), (6, [0.5, 0.333], []), (3, [0.667], []), (4, [0.5, 0.25], [])],
)
def test_budgets_are_possible_for_its_heads(
    kv_heads: int, ratios: list[float], counts: list[int], demo_geometry: HeadGeometry
) -> None:
    search = first(kv_heads, 1e8, LAPTOP, demo_geometry).search
    assert (search.kv_ratios, search.kv_heads) == (ratios, counts)


def test_nothing_is_left_of_one_head(demo_geometry: HeadGeometry) -> None:
    with pytest.raises(ConfigError, match="1 KV head"):
        first(1, 1e8, LAPTOP, demo_geometry)


def test_training_follows_size_and_hardware(demo_geometry: HeadGeometry) -> None:
    small = first(4, 1e8, LAPTOP, demo_geometry)
    assert (small.train.dtype, small.train.gpus_per_worker, small.resources.trial_gpus) == ("float32", 0, 0)
    assert (small.data.sequence_length, small.train.tuning, small.name) == (512, "full", "some-model-7b")
    assert first(4, 1e8, replace(LAPTOP, cpu_bfloat16=True), demo_geometry).train.dtype == "bfloat16"
    alone = first(4, 7e9, ONE_GPU, demo_geometry)
    # 16 bytes x 7e9 are more than 24 GiB: adapters
    assert (alone.train.tuning, alone.train.num_workers, alone.train.zero_stage) == ("lora", 1, 1)
    assert alone.train.dtype == "bfloat16" and alone.train.activation_checkpointing and alone.resources.trial_gpus == 1
    node = first(4, 7e9, NODE, demo_geometry)
    assert (node.train.tuning, node.train.num_workers, node.train.zero_stage) == ("full", 8, 3)
    assert (node.train.cpus_per_worker, node.data.sequence_length) == (7, 2048)


@pytest.mark.parametrize("source", ["stdlib", "texts", "it's: a #name"])
def test_each_text_is_seen_once(source: str, demo_geometry: HeadGeometry) -> None:
    config = first(4, 7e9, NODE, demo_geometry, source)
    steps = config.rungs.steps[-1] + config.promotion.steps
    assert config.data.train.tokens == steps * config.train.batch_size * config.data.sequence_length
    assert config.data.source == source


def arms(config: SearchConfig) -> list[str]:
    return [arm.name for arm in config.search.recipes]


@pytest.mark.parametrize("kind", [{}, {"smoke": True}, {"small": True}], ids=str)
def test_the_original_teaches_where_it_fits_and_rates_are_lower_without_it(
    kind: dict[str, Any], demo_geometry: HeadGeometry
) -> None:
    rates = []
    for parameters, hardware in ((1e8, LAPTOP), (7e9, NODE), (7e9, Hardware(1, 80 * GIGA, 16))):
        config = first(4, parameters, hardware, demo_geometry, **kind)
        assert config.train.distillation == "kl"
        rates.append((config.train.tuning, config.search.learning_rates[0]))
    assert rates == [("full", 1e-4), ("full", 3e-5), ("lora", 3e-4)]
    # 14 GB of frozen weights, and as many of the original, are more than may be taken of 24 GiB
    alone = first(4, 7e9, ONE_GPU, demo_geometry, **kind)
    assert alone.train.distillation == "none" and max(alone.search.learning_rates) <= 3e-5


def test_a_relaxation_is_proposed_only_where_all_weights_can_train(demo_geometry: HeadGeometry) -> None:
    assert "align" in arms(first(4, 7e9, NODE, demo_geometry))
    assert "align" not in arms(first(4, 7e9, ONE_GPU, demo_geometry))


def test_the_smoke_file_is_a_few_steps_of_two_trials(demo_geometry: HeadGeometry) -> None:
    smoke = first(4, 7e9, ONE_GPU, demo_geometry, smoke=True)
    assert smoke.name == "some-model-7b-smoke" and arms(smoke) == ["gqa", "headfold_gqa"]
    assert smoke.rungs.steps[-1] <= 4 and smoke.search.kv_ratios == [0.5] and smoke.search.num_samples == 0
    assert smoke.data.train.tokens < 100_000


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def test_a_large_model_on_one_gpu_takes_disk_that_there_is_or_says_so(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 1.6 TB: all weights in every checkpoint, and of every trial three copies for good."""
    (place / "qwen3-8b").mkdir()
    (place / "qwen3-8b" / "config.json").write_text(json.dumps(QWEN3_8B))
    taken: dict[float, float] = {}
    for free in (2000, 100):
        monkeypatch.setattr("orchestrator.resources.disk.disk_free", lambda _, free=free: free * GIGA)
        out = place / f"{free}.yaml"
        assert run_here("init", "qwen3-8b", "--gpus", 1, "--gpu-memory", 80, "--out", out) == 0
        output = capsys.readouterr()
        config = parse_config(read_yaml(out.read_text()))
        assert config.train.tuning == "lora" and config.promotion.keep_weights == "finalists"
        storage = stored(config)
        taken[free] = storage.disk(1).most / GIGA
        assert ("warning: the search takes up to" in output.err) == (taken[free] > free)
        assert stored(parse_config(read_yaml((place / f"{free}-smoke.yaml").read_text()))).disk(1).most < 120 * GIGA
    assert taken[100] < 200 and taken[2000] < 600


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip


def test_a_search_on_cpus_fits_the_memory_that_there_is_or_says_so(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "smollm2").mkdir()
    (place / "smollm2" / "config.json").write_text(json.dumps(SMOLLM2))
    seen = []
    for free in (64, 12, 1):
        monkeypatch.setattr("orchestrator.tasks.init.available_bytes", lambda free=free: free * GIGA)
        out = place / f"{free}.yaml"
        assert run_here("init", "smollm2", "--gpus", 0, "--out", out) == 0
        config = parse_config(read_yaml(out.read_text()))
        warned = "of memory, and" in capsys.readouterr().err
        seen.append((config.train.micro_batch_size, config.resources.max_concurrent, warned))
    assert seen == [(None, "auto", False), (1, 1, False), (1, 1, True)]


def test_hours_on_a_named_gpu_are_estimated_for_a_search_of_a_large_model(place: Path) -> None:
    (place / "qwen3-8b").mkdir()
    (place / "qwen3-8b" / "config.json").write_text(json.dumps(QWEN3_8B))
    assert run_here("init", "qwen3-8b", "--gpus", 1, "--gpu-memory", 80, "--out", place / "big.yaml") == 0
    hours = {}
    for gpu in ("H100", "L40S", None):
        named = [] if gpu is None else ["--gpu", gpu]
        run_here("estimate", place / "big.yaml", *named, "--json", place / "estimate.json")
        hours[gpu] = json.loads((place / "estimate.json").read_text())["gpu_hours"]
    assert hours[None] is None  # there is no GPU here, and none was named
    assert 0 < hours["H100"] < hours["L40S"]


def stored(config: SearchConfig) -> Storage:
    return storage_of(SearchSetup.open(config, weights=False))
