"""Greedy continuations side by side, and the token at which they part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import run_here
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from orchestrator.config.schema import ConfigError
from orchestrator.evaluation.generations import NEW_TOKENS, compare_generations, encode_prompts, greedy, read_prompts
from orchestrator.reporting.evaluation_tables import print_generation

PROMPT = "import os\n\n\ndef size_of(path):\n"


def test_continuations_are_those_of_transformers_generate(
    demo_model: PreTrainedModel, demo_tokenizer: PreTrainedTokenizerBase
) -> None:
    (ids,) = encode_prompts([PROMPT], demo_tokenizer, 512)
    stock = demo_model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    assert greedy(demo_model, ids, demo_tokenizer.eos_token_id) == stock[0, len(ids) :].tolist()
    likeliest = greedy(demo_model, ids, None)[0]
    assert greedy(demo_model, ids, likeliest) == [likeliest], "the end token ends it"


def test_the_first_token_where_two_part(demo_tokenizer: PreTrainedTokenizerBase) -> None:
    one, other = (
        demo_tokenizer.encode(text, add_special_tokens=False) for text in ("return os.path", "return os.name")
    )
    alike = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    (record,) = compare_generations(["x"], {"checkpoint": [one], "original": [other]}, demo_tokenizer)
    assert record["parts_at"] == alike > 0
    assert record["texts"] == {"checkpoint": "return os.path", "original": "return os.name"}
    assert record["parts"]["checkpoint"] == demo_tokenizer.decode([one[alike]])
    (same,) = compare_generations(["x"], {"checkpoint": [one], "original": [one]}, demo_tokenizer)
    assert same["parts_at"] is same["parts"] is None
    (shorter,) = compare_generations(["x"], {"checkpoint": [one[:2]], "original": [one]}, demo_tokenizer)
    assert (shorter["parts_at"], shorter["parts"]["checkpoint"]) == (2, "")


def test_prompts_and_answers_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Tags of chats and names of emoji are no markup."""
    texts = {"checkpoint": "[b]yes[/b] :key:"}
    print_generation({"prompt": "[INST] Is it? [/INST]", "texts": texts})
    printed = capsys.readouterr().out
    assert "[INST] Is it? [/INST]" in printed and texts["checkpoint"] in printed


@pytest.mark.heavy
def test_the_verb_prints_and_records_both(tmp_path: Path, demo_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "e.json"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    given = ["--original", demo_dir, "--prompts", prompts, "--eval-tokens", "256", "--speed-tokens", "0", "--json", out]
    assert run_here("evaluate", demo_dir, *given) == 0
    (record,) = json.loads(out.read_text())["generations"]
    assert record["prompt"] == PROMPT
    assert record["texts"]["checkpoint"] == record["texts"]["original"] != ""
    printed = capsys.readouterr().out
    assert record["texts"]["original"].splitlines()[0] in printed
    assert "tokens are equal to those of the original" in printed


def test_prompts_of_a_file_or_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text("def a\n\nclass B\n")
    assert read_prompts(str(tmp_path / "two.txt")) == ("def a", "class B")
    assert read_prompts("def a():\n    x") == ("def a():\n    x",)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("gone.txt", None, "no file"),
        ("empty.txt", "\n", "has none"),
        ("wrong.jsonl", '{"text": "x"}\n', "expected"),
        ("bytes.txt", b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_prompts_that_cannot_be(tmp_path: Path, name: str, text: str | bytes | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=said):
        read_prompts(str(tmp_path / name))


def test_a_prompt_without_room_after_it_is_refused(demo_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        encode_prompts(["x = 1\n" * 300], demo_tokenizer, 512)
