"""Text to token sequences: tokenise, join with the end token, cut to equal length, keep on disk, batch.

Legend: N sequences, T tokens a sequence, B sequences a step over all workers, W workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from attention.progress import Stage, stage
from trainers.text.corpora import HOLD_OUT, Corpus, DataError, resolve
from trainers.text.token_sets import (
    FORMAT,
    SHARD_TOKENS,
    Layout,
    Place,
    TokenSequences,
    TokenSetWriter,
    is_complete,
    read_sequences,
    write_sequences,
)
from trainers.text.tokenising import (
    Tokenise,
    TokenReader,
    blocks,
    check_end_token,
    largest_id,
    pool,
    tokenise_here,
    tokenizer_digest,
)

Split = Literal["train", "eval", "calibration"]
SPLITS: tuple[Split, ...] = get_args(Split)
SMALL = 16_000_000  # tokens of a text that one process reads and tokenises in seconds
POOL = 4_000_000  # tokens of text at most from which evaluation and calibration sequences are spaced evenly
CALIBRATION_SPREAD = 64  # calibration keeps one sequence in so many: few long documents must not stand for all
CALIBRATION_SEED = 1  # added to the seed: calibration takes other documents first than training does


@dataclass(frozen=True)
class TextCut:
    """Which text is cut into which sequences: those of one split of a source (see `trainers.text.corpora`), `[N, T]`
    with N = tokens // T.

    `train` and `calibration` come from the training side, documents shuffled by `seed` (each with its own order), the
    calibration evenly spaced over many documents; `eval` from the held-out side, evenly spaced over it, in fixed order
    whatever the seed. The sequences of `train` are the first of the text; evaluation and calibration are small, and
    their text is held in memory (see `POOL`).
    """

    source: str
    split: Split
    tokens: int
    sequence_length: int
    seed: int = 0
    text_field: str = "text"

    def __post_init__(self) -> None:
        """Raises DataError for what cannot be, before a text is read."""
        if self.split not in SPLITS:
            raise DataError(f"split must be one of {SPLITS}, got {self.split!r}")
        if self.sequence_length < 2:
            raise DataError(
                f"sequence_length must be at least 2 (one token predicts the next), got {self.sequence_length}"
            )
        if self.tokens < self.sequence_length:
            raise DataError(
                f"{self.split}: {self.tokens} tokens do not fill one sequence of {self.sequence_length}; raise tokens"
            )

    @property
    def sequences(self) -> int:
        return self.tokens // self.sequence_length

    @cached_property
    def corpus(self) -> Corpus:
        """Raises DataError for a source that is not there."""
        return resolve(self.source)

    def check(self) -> None:
        """Raises DataError for a source that is not there, and for one whose files are too small for a text that takes
        long to read; of a SMALL one reading tells how many tokens there are."""
        most = self.corpus.most_tokens
        if most is not None and self.tokens > max(most, SMALL):
            raise DataError(
                f"{self.source}: {self.split} needs {self.tokens} tokens, and all its text has {most} at most; ask for "
                "fewer tokens or give more text"
            )

    def folder(self, tokenizer: Any, cache_dir: str | Path, shard_tokens: int = SHARD_TOKENS) -> Path:
        """Where in `cache_dir` the token set lies, or will: the name holds everything that it depends on."""
        key = json.dumps([FORMAT, shard_tokens, self._made_of(tokenizer)], sort_keys=True)
        return Path(cache_dir) / f"{self.split}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"

    def _made_of(self, tokenizer: Any) -> dict[str, Any]:
        """All that the tokens depend on."""
        record = asdict(self) | {"tokens": self.sequences * self.sequence_length}
        record["seed"] = None if self.split == "eval" else self.seed
        record["spread"] = CALIBRATION_SPREAD if self.split == "calibration" else None
        return record | {"fingerprint": self.corpus.fingerprint, "tokenizer": tokenizer_digest(tokenizer)}

    def _texts(self) -> Iterator[str]:
        order = None if self.split == "eval" else self.seed + (CALIBRATION_SEED if self.split == "calibration" else 0)
        return self.corpus.documents("held_out" if self.split == "eval" else "train", self.text_field, order)

    def in_memory(self, tokenizer: Any) -> np.ndarray:
        """The sequences, `[N, T]` int32. Raises DataError when there is too little text."""
        check_end_token(tokenizer)
        tokens, wanted, length = tokenise_here(blocks(self._texts()), tokenizer), self.sequences, self.sequence_length
        if self.split == "train":
            reader = TokenReader(tokens, Place())
            ids = reader.take(wanted * length)
            documents = reader.place.documents
        else:
            most = POOL if self.split == "eval" else min(POOL, CALIBRATION_SPREAD * self.tokens)
            ids, documents = pool(tokens, max(self.tokens, most))
        there = len(ids) // length
        if there < wanted:
            raise self._too_few(len(ids), documents)
        return ids[: there * length].reshape(there, length)[np.arange(wanted) * there // wanted]

    def write(self, tokenizer: Any, folder: Path, shard_tokens: int, tokenise: Tokenise) -> None:
        """Write the token set, what an earlier run has left of it excepted. Raises DataError when there is too little
        text."""
        made_of, largest = self._made_of(tokenizer), largest_id(tokenizer)
        if self.split != "train":
            rows = torch.from_numpy(self.in_memory(tokenizer))
            write_sequences(rows, folder, largest_id=largest, shard_tokens=shard_tokens, made_of=made_of)
            return
        check_end_token(tokenizer)
        layout = Layout.of(self.sequences, self.sequence_length, largest, shard_tokens, made_of)
        writer = TokenSetWriter(folder, layout)
        missing = list(writer.missing())
        begun = missing[0][0] * layout.sequences_per_shard * self.sequence_length if missing else 0
        tokens = self.sequences * self.sequence_length
        with stage(f"tokenising {self.split} of {self.source}", tokens, "tokens", start=begun) as told:
            for run in missing:
                start = writer.start(run[0])
                texts = islice(self._texts(), start.documents, None)  # passed over, not tokenised again
                self._write_run(writer, run, TokenReader(tokenise(blocks(texts), tokenizer), start), told)
        writer.finish()

    def _write_run(self, writer: TokenSetWriter, run: list[int], reader: TokenReader, told: Stage) -> None:
        length, layout = self.sequence_length, writer.layout
        done = run[0] * layout.sequences_per_shard * length
        for number in run:
            wanted = layout.rows(number) * length
            ids = reader.take(wanted)
            if len(ids) < wanted:
                raise self._too_few(done + len(ids), reader.place.documents)
            writer.write(number, ids.reshape(-1, length), reader.place)
            told.to(done := done + wanted)

    def _too_few(self, tokens: int, documents: int) -> DataError:
        wanted, length = self.sequences, self.sequence_length
        there = tokens // length
        fewer = f"ask for at most {there * length} tokens or give" if there else "give"
        held_out = self.split == "eval" and not self.corpus.wholly_held_out
        apart = f" (about one document in {HOLD_OUT} is held out to measure on)" if held_out else ""
        return DataError(
            f"{self.source}: {self.split} needs {wanted} sequences of {length} tokens ({wanted * length}), found "
            f"{there} ({tokens} tokens in {documents} documents); {fewer} more text{apart}"
        )


def load_sequences(source: str, tokenizer: Any, *, cache_dir: str | Path | None = None, **cut: Any) -> Tensor:
    """The sequences of `TextCut(source, **cut)` in memory, `[N, T]` int64; without `cache_dir` none are kept."""
    if cache_dir is not None:
        return read_sequences(token_set(TextCut(source, **cut), tokenizer, cache_dir))[:]
    return torch.from_numpy(TextCut(source, **cut).in_memory(tokenizer)).long()


def token_set(
    cut: TextCut,
    tokenizer: Any,
    cache_dir: str | Path,
    *,
    tokenise: Tokenise = tokenise_here,
    shard_tokens: int = SHARD_TOKENS,
) -> Path:
    """The folder in `cache_dir` with the sequences of `cut`, for `read_sequences`; made unless it is there.

    A run that was killed is gone on with. Whatever `tokenise`, the set is the same. Raises DataError when there is too
    little text.
    """
    folder = cut.folder(tokenizer, cache_dir, shard_tokens)
    if not is_complete(folder):
        cut.write(tokenizer, folder, shard_tokens, tokenise)
    return folder


class BatchStream:
    """Endless shuffled epochs over `sequences [N, T]`: `next()` gives this worker's rows of a step, `[B / W, T]` int64.

    Worker r of W gets rows ⌊r B/W⌋ to ⌊(r + 1) B/W⌋ of the step, so that all together see what one worker would. An
    epoch's remainder begins the next one's first step. The state is a position, so resuming is exact, with any W. Of a
    set on disk only this worker's rows are read; memory holds the order of one epoch, 8 N bytes.
    """

    def __init__(
        self,
        sequences: Tensor | TokenSequences,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        if len(sequences.shape) != 2 or not len(sequences):
            raise ValueError(f"sequences must be [N, T] with at least one row, got shape {tuple(sequences.shape)}")
        if batch_size < max(1, world_size):
            raise ValueError(f"batch_size must give each of {world_size} worker(s) a sequence, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        self._sequences, self._batch_size, self._seed = sequences, batch_size, seed
        self._mine = range(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        self._position = 0
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def next(self) -> Tensor:
        rows = [self._row(self._position + row) for row in self._mine]
        self._position += self._batch_size
        return self._sequences[rows].long()

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._sequences))
        if epoch != self._epoch:
            # a seed of its own for each (seed, epoch), so that a position can be reached without the ones before
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._sequences), generator=generator)
        return int(self._order[offset])

    def skip(self, sequences: int) -> None:
        """Leave out the next sequences."""
        self._position += sequences

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "seed": self._seed, "sequences": len(self._sequences)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises ValueError for a state of another seed or of other data."""
        for name, mine in (("seed", self._seed), ("sequences", len(self._sequences))):
            if state[name] != mine:
                raise ValueError(
                    f"the stream's {name} must be {mine}, as here, got {state[name]}; start a new stream instead"
                )
        self._position = int(state["position"])
