"""Models with different tokenizers: losses in their tokens are not compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from verbs import check_finetuning, rehearse_evaluation

from attention.io.tokenizers import read_tokenizer
from orchestrator.checkpoints import check_same_tokens
from orchestrator.config.schema import ConfigError

SIZES = {"eval_tokens": 256, "sequence_length": 64, "dtype": "auto"}


def test_another_tokenizer_is_refused_before_a_model_is_loaded(demo_dir: Path, little_text: str) -> None:
    other = demo_dir.with_name("prose-code-qwen3")
    for key, models in {
        "checkpoint": {"original": other},
        "baseline": {"original": demo_dir, "baseline": other},
    }.items():
        with pytest.raises(
            ConfigError, match=rf"^{key}: the tokenizer of .* is not that of the original .*give a model"
        ):
            rehearse_evaluation(demo_dir, data=little_text, **models, **SIZES)
    told = rehearse_evaluation(demo_dir, demo_dir, data=little_text, **SIZES)
    assert "on 256 tokens of" in told["measures"]


def test_a_training_does_not_learn_from_a_model_of_other_tokens(
    demo_dir: Path, little_text: str, tmp_path: Path
) -> None:
    other = demo_dir.with_name("prose-code-qwen3")
    settings = {"steps": 1, "learning_rate": 1e-4, "train_data": little_text, "sequence_length": 64, "device": "cpu"}
    with pytest.raises(ConfigError, match="original: the tokenizer of"):
        check_finetuning(demo_dir, tmp_path / "out", original=other, **settings)


def test_a_model_without_a_tokenizer_is_taken_for_one_of_the_same(demo_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(demo_dir / "config.json")
    check_same_tokens(read_tokenizer(demo_dir), tmp_path, "checkpoint", "original")
