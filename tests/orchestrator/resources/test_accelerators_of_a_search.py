"""A search that cannot fit its requested GPUs is refused before it starts, and the suggested setting does fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator import checkpoints
from orchestrator.config.schema import ConfigError, SearchConfig, read_search_config
from orchestrator.main import app
from orchestrator.resources.processes import Need, Needs
from orchestrator.resources.size import inner_size
from orchestrator.search import validation
from orchestrator.search.estimate import estimate_search
from orchestrator.search.setup import SearchSetup
from orchestrator.search.validation import check_accelerators, validate_search

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "llama2-7b.yaml"
LLAMA_2_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11_008,
    "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 32_000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip
GIGA = 2.0**30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Only the config.json of Llama-2-7B."""
    folder = tmp_path / "llama-2-7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_2_7B))
    return folder


def config_of(model: Path, *changes: str) -> SearchConfig:
    return read_search_config(CONFIG, [f"model.path={model}", f"storage={model.parent}/runs", *changes])


def check(config: SearchConfig) -> None:
    check_accelerators(SearchSetup.open(config, weights=False))


def processes(config: SearchConfig, tmp_path: Path) -> dict[str, Need]:
    return {need.process: need for need in estimate_search(SearchSetup.open(config, weights=False), tmp_path).processes}


def test_the_shipped_configuration_fits_its_gpus(model: Path, tmp_path: Path) -> None:
    """Its parts, in bytes, by hand: 6.74 billion parameters over 8 workers, 2 x 4,096 tokens at once."""
    config = config_of(model)
    check(config)
    result = processes(config, tmp_path)
    assert set(result) == {"driver", "original model", "planning", "training worker", "promotion worker", "gate"}
    parameters = 2 * 32_000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11_008 + 2 * 4096) + 4096
    parts = result["training worker"].parts
    assert parts["weights"] == parts["teacher"] == round(2 * parameters / 8)
    assert parts["gradients"] == round(4 * parameters / 8)  # summed in float32
    assert parts["optimiser"] == round(12 * parameters / 8)
    assert parts["gathered"] == 2 * (2 * 10**9 + 3 * 32_000 * 4096)
    assert parts["optimiser's step"] == round(8 * parameters / 8)  # larger than activations and logits at their time
    assert result["training worker"].limit == 40 * 10**9
    assert result["driver"].total < GIGA  # no weights
    assert 1 < result["planning"].total / (2 * parameters) < 2  # one copy of the model
    assert all(need.fits for need in result.values())


@pytest.mark.parametrize(
    ("kind", "choice"), [("A100", True), ("L40S", True), ("H100", False), ("SOMETHING-NEW", False)]
)
def test_as_little_is_computed_anew_as_the_memory_allows(model: Path, kind: str, choice: bool | str) -> None:
    def chosen(*changes: str) -> Any:
        config = config_of(model, f"resources.accelerator_type={kind}", *changes)
        return Needs(SearchSetup.open(config, weights=False).inputs, "pooled").recomputations

    assert chosen() == {"training worker": choice, "promotion worker": choice}
    if kind == "H100":
        larger = "train.micro_batch_size=3"
        assert chosen(larger, "train.batch_size=192")["training worker"] == "selective"
        assert chosen("promotion.train={micro_batch_size: 16}") == {"training worker": False, "promotion worker": True}
    assert set(chosen("train.activation_checkpointing=selective").values()) == {"selective"}


@pytest.mark.parametrize("kind", ["A10G", "T4", "V100"])
def test_what_does_not_fit_is_refused_with_what_would(model: Path, tmp_path: Path, kind: str) -> None:
    config = config_of(model, f"resources.accelerator_type={kind}")
    with pytest.raises(ConfigError) as refused:
        check(config)
    line = next(line for line in str(refused.value).splitlines() if "training worker" in line)
    assert line.startswith(f"resources.accelerator_type: {kind} has ")
    assert "of it optimiser; what helps: train.zero_stage=3 with more train.num_workers, train.tuning=lora" in line
    (larger,) = re.findall(r"resources\.accelerator_type=(\S+)$", line)
    assert processes(config_of(model, f"resources.accelerator_type={larger}"), tmp_path)["training worker"].fits


def test_the_remedy_is_for_what_takes_most(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"of it activations; what helps: a smaller train\.micro_batch_size or "):
        check(config_of(model, "train.activation_checkpointing=false", "train.micro_batch_size=16"))
    with pytest.raises(ConfigError, match=r"of it weights; what helps: train\.zero_stage=3 with more "):
        check(config_of(model, "train.zero_stage=1"))


def test_planning_and_promotion_count_too(model: Path) -> None:
    small = "resources.trial_accelerator_type=T4"
    with pytest.raises(ConfigError, match=r"trial_accelerator_type: T4 has 16 GB.*planning.*trial_gpus=0"):
        check(config_of(model, small))
    check(config_of(model, "resources.trial_gpus=0"))
    with pytest.raises(ConfigError) as refused:
        check(config_of(model, "promotion.train={zero_stage: 1}"))
    assert [line.split(" takes ")[0].split("the ")[-1] for line in str(refused.value).splitlines()] == [
        "promotion worker"
    ]
    assert "what helps: promotion.train.zero_stage=3" in str(refused.value)


def test_a_promotion_on_other_gpus_is_measured_by_those(model: Path) -> None:
    small, large = (f"promotion.resources.accelerator_type={kind}" for kind in ("A10G", "H100"))
    for changes in ([small], [small, "resources.accelerator_type=null"]):
        with pytest.raises(ConfigError) as refused:
            check(config_of(model, *changes))
        (line,) = str(refused.value).splitlines()
        assert line.startswith("promotion.resources.accelerator_type: A10G has 24 GB") and "promotion worker" in line
    config = config_of(model, large)
    check(config)
    needs = Needs(SearchSetup.open(config, weights=False).inputs, "pooled")
    assert needs.recomputations == {"training worker": True, "promotion worker": False}


@pytest.mark.parametrize(
    ("fields", "inner"),
    [
        ({"intermediate_size": 11_008}, 11_008),
        ({"intermediate_size": 2880, "num_experts_per_tok": 4}, 4 * 2880),
        ({"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts_per_tok": 8}, 6144),
        (
            {"intermediate_size": 10_944, "moe_intermediate_size": 1408, "num_experts_per_tok": 8}
            | {"n_shared_experts": 1},
            9 * 1408,
        ),
    ],
)
def test_the_inner_values_of_a_mixture_are_those_of_the_experts_of_a_token(fields: dict[str, int], inner: int) -> None:
    config: Any = SimpleNamespace(**fields)
    assert inner_size(config) == inner


def test_nothing_is_refused_of_a_type_that_is_not_known(model: Path) -> None:
    check(config_of(model, "resources.accelerator_type=SOMETHING-NEW", "train.zero_stage=1"))
    check(config_of(model, "resources.accelerator_type=null", "train.zero_stage=1"))
    check(config_of(model, "resources.accelerator_type=A100-80G"))


def test_a_search_does_not_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a text is looked at. The weights, which are not there, are not the point."""
    read = checkpoints.open_checkpoint

    def without_weights(path: str, *arguments: Any, **more: Any) -> Any:
        return read(path, *arguments, **more | {"weights": False})

    monkeypatch.setattr(checkpoints, "open_checkpoint", without_weights)
    monkeypatch.setattr(validation.SearchTexts, "check", lambda *arguments: pytest.fail("texts were looked at"))
    with pytest.raises(ConfigError, match="A10G has 24 GB"):
        validate_search(config_of(model, "resources.accelerator_type=A10G"))


def test_the_verb_reports_the_parts_and_ends_with_an_error(model: Path, tmp_path: Path) -> None:
    record = tmp_path / "estimate.json"
    same = [
        "estimate",
        str(CONFIG),
        f"model.path={model}",
        f"storage={tmp_path}/runs",
        "--json",
        str(record),
        "--verbose",
    ]
    done = CliRunner().invoke(app, same)
    assert done.exit_code == 0, done.output
    assert "memory, training worker" in done.output and "gathered" in done.output
    refused = CliRunner().invoke(app, [*same, "resources.accelerator_type=A10G"])
    assert refused.exit_code != 0 and isinstance(refused.exception, ConfigError)
    assert json.loads(record.read_text())["refusals"]
