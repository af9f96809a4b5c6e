"""Generated text side by side: what two models make of the same prompts, and where they part."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from attention.modeling.growing_cache import next_output
from attention.modeling.running import evaluating
from orchestrator.config.schema import ConfigError
from trainers.text.tokenising import beginning

NEW_TOKENS = 48


def read_prompts(given: str | None) -> tuple[str, ...]:
    """The prompts of a file (.jsonl: `{"prompt": "..."}` a line; any other: one prompt a line), or the text itself.

    Raises ConfigError for a file without prompts, or that is not there and whose name says it should be.
    """
    if given is None:
        return ()
    file = Path(given)
    if len(given) > 255 or "\n" in given or not file.is_file():
        if file.suffix in (".txt", ".jsonl") and " " not in given:
            raise ConfigError(f"prompts: no file at {given!r}; give a file with one prompt a line, or a prompt itself")
        prompts = [given]
    else:
        lines = [line for line in _text_of(file).splitlines() if line.strip()]
        prompts = [_prompt(line, file) for line in lines] if file.suffix == ".jsonl" else lines
    if not any(prompt.strip() for prompt in prompts):
        raise ConfigError(f"prompts: {given!r} has none; give a file with one prompt a line, or a prompt itself")
    return tuple(prompts)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts: {str(file)!r} cannot be read as text: {error}") from None


def _prompt(line: str, file: Path) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, Mapping) or not isinstance(record.get("prompt"), str):
        raise ConfigError(f'prompts: {str(file)!r}: expected {{"prompt": "..."}} in every line, got {line[:60]!r}')
    return record["prompt"]


def encode_prompts(prompts: Sequence[str], tokenizer: Any, most: int) -> list[list[int]]:
    """Token ids of each. Raises ConfigError for one after which a model of `most` positions has no room."""
    first = beginning(tokenizer)  # and not what some tokenizers put after a text
    encoded = [[*first, *tokenizer.encode(prompt, add_special_tokens=False)] for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not 0 < len(ids) <= most - NEW_TOKENS:
            raise ConfigError(
                f"prompts: {prompt[:40]!r} has {len(ids)} tokens; with {NEW_TOKENS} new ones it must have 1 to "
                f"{most - NEW_TOKENS} for this model"
            )
    return encoded


def greedy(model: Any, prompt: Sequence[int], end: int | None) -> list[int]:
    """The likeliest next tokens, NEW_TOKENS of them, or up to and with the token `end`."""
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    made: list[int] = []
    with evaluating(model):
        output = model(ids, use_cache=True)
        while len(made) < NEW_TOKENS:
            token = output.logits[:, -1:].argmax(-1)
            made.append(int(token))
            if made[-1] == end:
                break
            output = next_output(model, token, output)
    return made


def side_by_side(
    prompts: Sequence[str], made: Mapping[str, Sequence[Sequence[int]]], tokenizer: Any
) -> list[dict[str, Any]]:
    """A record for each prompt: the text that each model writes, and `parts_at`, the number of tokens that checkpoint
    and original have alike before they part, with the tokens that follow in `parts`; None where they never do, or
    without an original. `made`: token ids of each model's continuations."""
    records = []
    for index, prompt in enumerate(prompts):
        ids = {name: list(continuations[index]) for name, continuations in made.items()}
        record: dict[str, Any] = {"prompt": prompt, "tokens": len(ids["checkpoint"]), "parts_at": None, "parts": None}
        record["texts"] = {name: tokenizer.decode(tokens) for name, tokens in ids.items()}
        if "original" in ids and ids["checkpoint"] != ids["original"]:
            one, other = ids["checkpoint"], ids["original"]
            alike = zip(one, other, strict=False)
            at = next((i for i, (a, b) in enumerate(alike) if a != b), min(len(one), len(other)))
            parts = {"checkpoint": tokenizer.decode(one[at : at + 1]), "original": tokenizer.decode(other[at : at + 1])}
            record |= {"parts_at": at, "parts": parts}
        records.append(record)
    return records
