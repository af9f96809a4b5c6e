"""The tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attention.io.checkpoint import load_config
from attention.io.sources import CheckpointError, only_cached

# Any of them holds a vocabulary; others are named by the tokenizer's class.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json")


class TokenizerError(ValueError):
    """A tokenizer that is not there or cannot be read. The message says which files to copy."""


def read_tokenizer(source: str | Path, config: Any = None) -> Any:
    """Return the tokenizer of a folder or hub name; `config`: of the model, where it was read.

    For many families transformers makes an empty tokenizer of a folder without its files, which
    turns every text into nothing: that is refused too.

    Raises:
        TokenizerError: If there is none.
    """
    folder = Path(source)
    try:
        cached = not folder.is_dir() and only_cached(source)
        tokenizer = _read(str(source), cached, config)
    except (
        Exception
    ) as error:  # its files may hold anything, and their readers may stumble over it in any way
        present = [name for name in VOCABULARIES if (folder / name).is_file()]
        if folder.is_dir() and not present:
            raise _none_at(source) from None
        message = " ".join((str(error) or type(error).__name__).split())[:300]
        what = (
            f"{folder / present[0]} cannot be read"
            if present
            else f"no tokenizer at {str(source)!r}"
        )
        raise TokenizerError(f"{what}: {message}; copy it again from the model's source") from None
    files: dict[str, str] = type(tokenizer).vocab_files_names
    if (
        folder.is_dir()
        and files
        and not any((folder / name).is_file() for name in (*VOCABULARIES, *files.values()))
    ):
        raise _none_at(source)
    return tokenizer


def _read(source: str, cached: bool, config: Any) -> Any:
    """Read a tokenizer by the config in the folder, or by one made of a config that is refused."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            source, local_files_only=cached, trust_remote_code=False
        )
    except Exception:
        try:
            config = load_config(source) if config is None else config
        except CheckpointError:
            config = None
        if config is None:
            raise
        return AutoTokenizer.from_pretrained(
            source, config=config, local_files_only=cached, trust_remote_code=False
        )


def _none_at(source: str | Path) -> TokenizerError:
    return TokenizerError(
        f"no tokenizer in the checkpoint {str(source)!r}; copy tokenizer.json and "
        f"tokenizer_config.json (or "
        "tokenizer.model, or vocab.json with merges.txt) from the model's source into the folder"
    )
