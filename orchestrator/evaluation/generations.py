"""Generated text side by side: what models write after the same prompts, and where they differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from attention.modeling.growing_cache import next_output
from attention.modeling.running import evaluating
from orchestrator.config.schema import ConfigError
from trainers.text.tokenising import beginning

NEW_TOKENS = 48


class Generation(TypedDict):
    """What models write after one prompt."""

    prompt: str
    tokens: int
    """That the checkpoint writes."""
    parts_at: int | None
    """Tokens that checkpoint and original have alike before they differ; None where they never
    do, or without an original."""
    parts: dict[str, str] | None
    """The tokens that follow there, by model."""
    texts: dict[str, str]
    """By model."""


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except (OSError, ValueError):  # a prompt, which is too long for a name
        return False


def read_prompts(source: str | None) -> tuple[str, ...]:
    """Return prompts.

    Args:
        source: A file (.jsonl: `{"prompt": "..."}` per line; any other: one prompt per line), or
            a prompt itself.

    Raises:
        ConfigError: For a file without prompts, or one that is not there and whose name says that
            it should be.
    """
    if source is None:
        return ()
    file = Path(source)
    if "\n" in source or not _is_file(file):
        if file.suffix in (".txt", ".jsonl") and " " not in source:
            raise ConfigError(
                f"prompts: no file at {source!r}; give a file with one prompt per line, or "
                "a prompt itself"
            )
        prompts = [source]
    else:
        prompts = [line for line in _read_text(file).split("\n") if line.strip()]
        if file.suffix == ".jsonl":
            prompts = [_prompt_of(line, file) for line in prompts]
    if not any(prompt.strip() for prompt in prompts):
        raise ConfigError(
            f"prompts: {source!r} has none; give a file with one prompt per line, or a prompt"
        )
    return tuple(prompts)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts: {str(file)!r} cannot be read as text: {error}") from None


def _prompt_of(line: str, file: Path) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, Mapping) or not isinstance(record.get("prompt"), str):
        raise ConfigError(
            f'prompts: {str(file)!r}: expected {{"prompt": "..."}} in every line, got {line[:60]!r}'
        )
    return record["prompt"]


def encode_prompts(prompts: Sequence[str], tokenizer: Any, max_positions: int) -> list[list[int]]:
    """Return the token ids of each prompt.

    Raises:
        ConfigError: For one after which a model of `max_positions` has no room.
    """
    first = beginning(tokenizer)  # and not what some tokenizers put after a text
    encoded = [[*first, *tokenizer.encode(prompt, add_special_tokens=False)] for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not 0 < len(ids) <= max_positions - NEW_TOKENS:
            raise ConfigError(
                f"prompts: {prompt[:40]!r} has {len(ids)} tokens; with {NEW_TOKENS} new ones it "
                f"must have 1 to {max_positions - NEW_TOKENS} for this model"
            )
    return encoded


def greedy(model: Any, prompt: Sequence[int], end: int | None) -> list[int]:
    """Return the likeliest next tokens: NEW_TOKENS of them, or up to and with the token `end`."""
    ids = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    tokens: list[int] = []
    with evaluating(model):
        output = model(ids, use_cache=True)
        while len(tokens) < NEW_TOKENS:
            token = output.logits[:, -1:].argmax(-1)
            tokens.append(int(token))
            if tokens[-1] == end:
                break
            output = next_output(model, token, output)
    return tokens


def compare_generations(
    prompts: Sequence[str], continuations: Mapping[str, Sequence[Sequence[int]]], tokenizer: Any
) -> list[Generation]:
    """Return a record for each prompt.

    Args:
        prompts: The prompts.
        continuations: Token ids by model, then by prompt; `checkpoint` is one of the models.
        tokenizer: Of all models.
    """
    records = []
    for index, prompt in enumerate(prompts):
        ids = {name: list(rows[index]) for name, rows in continuations.items()}
        tokens = ids["checkpoint"]
        record: Generation = {
            "prompt": prompt,
            "tokens": len(tokens),
            "parts_at": None,
            "parts": None,
            "texts": {name: tokenizer.decode(row) for name, row in ids.items()},
        }
        original = ids.get("original", tokens)
        if tokens != original:
            pairs = enumerate(zip(tokens, original, strict=False))
            shorter = min(len(tokens), len(original))
            at = next((i for i, (a, b) in pairs if a != b), shorter)
            record["parts_at"] = at
            record["parts"] = {
                "checkpoint": tokenizer.decode(tokens[at : at + 1]),
                "original": tokenizer.decode(original[at : at + 1]),
            }
        records.append(record)
    return records
