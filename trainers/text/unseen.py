"""A third text: held-out documents that no sequence of the evaluation text touches.

A step, trial or finalist that was chosen by its loss on the evaluation text looks better there than
it is. Documents that were not used for any choice show its true loss. The evaluation text does not
change: this text takes the rest of the held-out side.

Legend: N sequences, T tokens per sequence, n tokens of a text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.text.corpora import DataError, document_digest
from trainers.text.data import CALIBRATION_SPREAD, FEWEST, POOL, PooledTokens, TextCut
from trainers.text.token_sets import SHARD_TOKENS, is_complete, read_sequences, write_sequences
from trainers.text.tokenising import (
    DOCUMENTS_AT_ONCE,
    Tokenise,
    beginning,
    check_end_token,
    largest_id,
    text_blocks,
    tokenise_here,
)

_FORMAT = 1
_DOCUMENTS = "documents"
"""Folder in the token set: for each token the number of its document, `[N, T]`."""


@dataclass(frozen=True)
class UnseenCut:
    """Sequences of held-out documents, evenly spaced over them; fewer where there is less text.

    Attributes:
        text: Source, number and length of the sequences; an `eval` cut.
        seen: The evaluation text, none of whose documents is taken.
    """

    text: TextCut
    seen: TextCut

    @property
    def source(self) -> str:
        """Source of the text."""
        return self.text.source

    @property
    def tokens(self) -> int:
        """Most tokens."""
        return self.text.tokens

    def check(self) -> None:
        """Do nothing: the length of the text is known only when it is read."""

    def folder(
        self, tokenizer: Any, cache_dir: str | Path, shard_tokens: int = SHARD_TOKENS
    ) -> Path:
        """Return the folder of the token set in `cache_dir`, existing or not."""
        names = [cut.folder(tokenizer, "", shard_tokens).name for cut in (self.text, self.seen)]
        key = json.dumps([_FORMAT, *names])
        return Path(cache_dir) / f"unseen-{hashlib.sha256(key.encode()).hexdigest()[:24]}"

    def write(self, tokenizer: Any, folder: Path, shard_tokens: int, _: Tokenise) -> None:
        """Write the token set, and next to it the document of each token.

        Raises:
            DataError: Where fewer than FEWEST sequences or two documents remain.
        """
        check_end_token(tokenizer)
        ids, numbers = self._unseen(tokenizer)
        documents = len(np.unique(numbers))
        there = len(ids) // self.text.sequence_length
        if there < FEWEST or documents < 2:
            raise DataError(
                f"in addition to the {self.seen.sequences} measured sequences, the held-out "
                f"documents of {self.source} leave {len(ids)} tokens in {documents} documents, "
                f"expected at least {FEWEST * self.text.sequence_length} in 2; give more text, a "
                "source for data.test, or fewer data.eval.tokens"
            )
        cut = replace(self.text, at_most=True)
        rows = PooledTokens(ids, documents, beginning(tokenizer)).sequences(cut)
        documents_of_rows = PooledTokens(numbers, documents, []).sequences(cut)
        write_sequences(
            torch.from_numpy(documents_of_rows), folder / _DOCUMENTS, shard_tokens=shard_tokens
        )
        write_sequences(
            torch.from_numpy(rows),
            folder,
            largest_id=largest_id(tokenizer),
            shard_tokens=shard_tokens,
            made_of={"unseen": folder.name},
        )

    def _unseen(self, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the remaining tokens `[n]`, and their documents `[n]`."""
        pool = _Pool(self.seen, tokenizer)
        pool.read(max(self.seen.tokens, POOL))
        touched = PooledTokens(pool.numbers, len(pool.digests), []).sequences(self.seen)
        seen = {pool.digests[number] for number in np.unique(touched)}
        if self.text.source != self.seen.source:
            pool = _Pool(self.text, tokenizer)
        limit = max(self.tokens, min(POOL, CALIBRATION_SPREAD * self.tokens))
        while len((left := pool.without(seen))[0]) < self.tokens and pool.read(limit):
            pass
        return left


class _Pool:
    """Tokens `ids` `[n]` of the first documents of a text, and their documents `numbers` `[n]`.

    Attributes:
        digests: Of the documents.
    """

    def __init__(self, cut: TextCut, tokenizer: Any) -> None:
        self.ids = np.empty(0, np.int32)
        self.numbers = np.empty(0, np.int32)
        self.digests: list[bytes] = []
        self._documents = 0
        self._blocks = tokenise_here(text_blocks(self._noted(cut.documents())), tokenizer)

    def _noted(self, texts: Iterable[str]) -> Iterator[str]:
        for text in texts:
            self.digests.append(document_digest(text))
            yield text

    def read(self, limit: int) -> bool:
        """Take what `trainers.text.tokenising.pool` takes; whether there was any more."""
        ids = [self.ids]
        numbers = [self.numbers]
        total = 0
        for block in self._blocks:
            lengths = np.diff(block.ends, prepend=0)
            places = np.arange(len(lengths), dtype=np.int32) + self._documents
            ids.append(block.ids)
            numbers.append(np.repeat(places, lengths))
            self._documents += len(lengths)
            total += len(block.ids)
            if total >= limit and self._documents % DOCUMENTS_AT_ONCE == 0:
                break
        self.ids = np.concatenate(ids)
        self.numbers = np.concatenate(numbers)
        return total > 0

    def without(self, digests: set[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the same without some documents."""
        left = np.array([digest not in digests for digest in self.digests], dtype=bool)
        chosen = left[self.numbers]
        return self.ids[chosen], self.numbers[chosen]


def documents_of(folder: str | Path) -> Tensor:
    """Return the document of each token of a token set, `[N, T]` int64.

    Where that was not noted, each sequence counts as a document.
    """
    if is_complete(Path(folder) / _DOCUMENTS):
        return read_sequences(Path(folder) / _DOCUMENTS)[:]
    count, length = read_sequences(folder).shape
    return torch.arange(count)[:, None].expand(count, length)
