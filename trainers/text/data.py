"""Text to token sequences.

Tokenise, join with the end token, cut to equal length, keep on disk, batch.

Where a tokenizer begins every text with a special token, every sequence begins with it too: a
sequence begins in the middle of a document, and most heads attend to the first token of every
prompt. It replaces the sequence's first token, which is not predicted.

Legend: N sequences, T tokens per sequence, B sequences per step over all workers, W workers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from attention.base.progress import ProgressStage, stage
from trainers.text.corpora import (
    BUILTIN,
    HOLD_OUT,
    Corpus,
    DataError,
    Division,
    Side,
    document_digest,
    resolve,
)
from trainers.text.token_sets import (
    SHARD_TOKENS,
    TOKEN_SET_FORMAT,
    Layout,
    TextPosition,
    TokenSequences,
    TokenSetWriter,
    is_complete,
    read_sequences,
    write_sequences,
)
from trainers.text.tokenising import (
    Tokenise,
    TokenReader,
    beginning,
    check_end_token,
    largest_id,
    pool,
    text_blocks,
    tokenise_here,
    tokenizer_digest,
)

Split = Literal["train", "eval", "calibration"]
SPLITS: tuple[Split, ...] = get_args(Split)
SMALL_TEXT = 16_000_000  # tokens of a text that one process reads and tokenises in seconds
# Tokens of text at most from which evaluation and calibration sequences are spaced evenly.
POOL = 4_000_000
CALIBRATION_SPREAD = (
    64  # calibration keeps one sequence in so many: few long documents must not stand for all
)
_COMPARED = 64_000_000  # characters of the other text that a whole evaluation text is compared with
CALIBRATION_TOKENS = 16_384  # to calibrate and to measure on by default, or as many as there are
LENGTH = 2048  # tokens of a sequence by default
_SHORTEST = 64  # tokens of the sequences that little text is cut to
FEWEST = (
    4  # sequences of a split: little text is cut to shorter ones, since a standard error needs some
)
CALIBRATION_SEED = (
    1  # added to the seed: calibration takes other documents first than training does
)


@dataclass(frozen=True)
class TextCut:
    """Which text is cut into which sequences.

    Those of one split of a source (see `trainers.text.corpora`), `[N, T]` with N = tokens // T.

    `train` and `calibration` come from the training side, documents shuffled by `seed` (each with
    its own order), the calibration evenly spaced over many documents; `eval` from the held-out
    side, evenly spaced over it, in fixed order for every seed. The sequences of `train` are the
    first of the text; evaluation and calibration are small, and their text is read into memory (see
    `POOL`).

    Attributes:
        division: How the source is divided into the two sides.
        apart_from: Other sources, whose documents are left out of `eval`; of plain text files
            those too all of whose paragraphs are there, since few files are divided into paragraphs
            and many are not.
        at_most: Where there is less text, all that there is.
    """

    source: str
    split: Split
    tokens: int
    sequence_length: int
    seed: int = 0
    text_field: str = "text"
    division: Division = "twentieth"
    apart_from: tuple[str, ...] = ()
    at_most: bool = False

    def __post_init__(self) -> None:
        """Raise DataError for what cannot be, before a text is read."""
        if self.split not in SPLITS:
            raise DataError(f"split must be one of {SPLITS}, got {self.split!r}")
        if self.sequence_length < 2:
            raise DataError(
                f"sequence_length must be at least 2 (one token predicts the next), got "
                f"{self.sequence_length}"
            )
        if self.tokens < self.sequence_length:
            raise DataError(
                f"{self.split}: {self.tokens} tokens do not fill one sequence of "
                f"{self.sequence_length}; raise tokens"
            )

    @property
    def sequences(self) -> int:
        return self.tokens // self.sequence_length

    @cached_property
    def corpus(self) -> Corpus:
        """Raises DataError for a source that is not there."""
        return resolve(self.source)

    def check(self) -> None:
        """Raise DataError for a source that is missing or too small, before it is read.

        A text up to `SMALL_TEXT` tokens is checked when it is read.
        """
        most = self.corpus.most_tokens
        if most is not None and self.tokens > max(most, SMALL_TEXT):
            raise DataError(
                f"{self.source}: {self.split} needs {self.tokens} tokens, and all its text has "
                f"{most} at most; ask for fewer tokens (--{self.split}-tokens, "
                f"data.{self.split}.tokens) or give more text"
            )

    def folder(
        self, tokenizer: Any, cache_dir: str | Path, shard_tokens: int = SHARD_TOKENS
    ) -> Path:
        """Return the folder of the token set in `cache_dir`, existing or not.

        The name holds everything that it depends on.
        """
        key = json.dumps(
            [TOKEN_SET_FORMAT, shard_tokens, self._definition(tokenizer)], sort_keys=True
        )
        return Path(cache_dir) / f"{self.split}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"

    def _definition(self, tokenizer: Any) -> dict[str, Any]:
        """All that the tokens depend on."""
        record = asdict(self) | {"tokens": self.sequences * self.sequence_length}
        record["seed"] = None if self.split == "eval" else self.seed
        record["spread"] = CALIBRATION_SPREAD if self.split == "calibration" else None
        # Values that have always been the default are left out, so that token sets keep their names
        for name, plain in (("division", "twentieth"), ("apart_from", ()), ("at_most", False)):
            if record[name] == plain:
                del record[name]
        if self.apart_from:
            record["apart_from"] = [resolve(source).fingerprint for source in self.apart_from]
        if first := beginning(tokenizer):
            record["beginning"] = first
        return record | {
            "fingerprint": self.corpus.fingerprint,
            "tokenizer": tokenizer_digest(tokenizer),
        }

    def first_document(self) -> str | None:
        """Return the document that the sequences begin with; None where there is none."""
        return next(self._texts(), None)

    def documents(self) -> Iterator[str]:
        """Return the documents in the order in which they are cut."""
        return self._texts()

    def _texts(self, left_out: list[str] | None = None) -> Iterator[str]:
        """Documents in order. `left_out`: takes those that also stand in `apart_from`."""
        seed = self.seed + (CALIBRATION_SEED if self.split == "calibration" else 0)
        side: Side = "held_out" if self.split == "eval" else "train"
        options = {"division": self.division, "mixed": self.split != "train"}
        texts = self.corpus.documents(
            side, self.text_field, None if self.split == "eval" else seed, **options
        )
        if not self.apart_from:
            yield from texts
            return
        other_texts = self._excluded_digests()
        plain = self.corpus.is_plain_text
        for text in texts:
            there = document_digest(text) in other_texts
            there = there or (plain and other_texts.issuperset(_paragraph_digests(text)))
            if not there:
                yield text
            elif left_out is not None:
                left_out.append(text)

    def _excluded_digests(self) -> set[bytes]:
        """Return digests of the documents of `apart_from`.

        They are those of the first `_COMPARED` characters of each in the order in which a
        calibration reads them.
        """
        digests: set[bytes] = set()
        for other in map(resolve, self.apart_from):
            characters = 0
            for text in other.documents(
                "train", self.text_field, self.seed + CALIBRATION_SEED, "whole", mixed=True
            ):
                digests.add(document_digest(text))
                if other.is_plain_text and self.corpus.is_plain_text:
                    digests.update(_paragraph_digests(text))
                characters += len(text)
                if characters >= _COMPARED:
                    break
        return digests

    def in_memory(self, tokenizer: Any) -> np.ndarray:
        """Return the sequences, `[N, T]` int32. Raises DataError when there is too little text."""
        if self.split != "train":
            return self.pooled(tokenizer).sequences(self)
        check_end_token(tokenizer)
        reader = TokenReader(tokenise_here(text_blocks(self._texts()), tokenizer), TextPosition())
        ids = reader.take(self.sequences * self.sequence_length)
        return PooledTokens(ids, reader.place.documents, beginning(tokenizer)).sequences(self)

    def pooled(self, tokenizer: Any) -> PooledTokens:
        """Return the text that the sequences of an evaluation or a calibration are spaced over."""
        check_end_token(tokenizer)
        left_out: list[str] = []
        most = POOL if self.split == "eval" else min(POOL, CALIBRATION_SPREAD * self.tokens)
        tokens = tokenise_here(text_blocks(self._texts(left_out)), tokenizer)
        ids, documents = pool(tokens, max(self.tokens, most))
        return PooledTokens(ids, documents, beginning(tokenizer), len(left_out))

    def write(self, tokenizer: Any, folder: Path, shard_tokens: int, tokenise: Tokenise) -> None:
        """Write the token set, what an earlier run has left of it excepted.

        Raises:
            DataError: When there is too little text.
        """
        made_of = self._definition(tokenizer)
        largest = largest_id(tokenizer)
        if self.split != "train":
            rows = torch.from_numpy(self.in_memory(tokenizer))
            write_sequences(
                rows, folder, largest_id=largest, shard_tokens=shard_tokens, made_of=made_of
            )
            return
        check_end_token(tokenizer)
        layout = Layout.of(self.sequences, self.sequence_length, largest, shard_tokens, made_of)
        writer = TokenSetWriter(folder, layout)
        missing = list(writer.missing())
        begun = missing[0][0] * layout.sequences_per_shard * self.sequence_length if missing else 0
        tokens = self.sequences * self.sequence_length
        with stage(
            f"tokenising {self.split} of {self.source}", tokens, "tokens", start=begun
        ) as progress:
            for run in missing:
                start = writer.start(run[0])
                # Passed over, not tokenised again.
                texts = islice(self._texts(), start.documents, None)
                reader = TokenReader(tokenise(text_blocks(texts), tokenizer), start)
                self._write_run(writer, run, reader, beginning(tokenizer), progress)
        writer.finish()

    def _write_run(
        self,
        writer: TokenSetWriter,
        run: list[int],
        reader: TokenReader,
        first: list[int],
        progress: ProgressStage,
    ) -> None:
        length = self.sequence_length
        layout = writer.layout
        done = run[0] * layout.sequences_per_shard * length
        for number in run:
            tokens_needed = layout.rows(number) * length
            ids = reader.take(tokens_needed)
            if len(ids) < tokens_needed:
                raise self.too_few(done + len(ids), reader.place.documents)
            writer.write(number, _begun(ids.reshape(-1, length), first), reader.place)
            progress.to(done := done + tokens_needed)

    def too_few(self, tokens: int, documents: int, left_out: int = 0) -> DataError:
        """Return the mistake that a text of so many tokens is."""
        requested = self.sequences
        length = self.sequence_length
        there = tokens // length
        fewer = f"ask for at most {there * length} tokens or give" if there else "give"
        apart = ""
        if left_out:
            others = " and ".join(self.apart_from)
            apart = f" ({left_out} documents also stand in {others} and are left out)"
        elif self.split == "eval" and not self.corpus.wholly_held_out:
            share = (
                "a part of the documents"
                if self.division == "by_size"
                else f"about one document in {HOLD_OUT}"
            )
            apart = (
                f" ({share} is held out to measure on, by a digest of its text: of equal ones all "
                f"or none)"
            )
        return DataError(
            f"{self.source}: {self.split} needs {requested} sequences of {length} tokens "
            f"({requested * length}), found "
            f"{there} ({tokens} tokens in {documents} documents); {fewer} more text{apart}"
        )


def other_sources(corpus: Corpus, learned_from: Iterable[str]) -> tuple[str, ...]:
    """Return what a text to measure on may have documents of, `TextCut.apart_from`.

    Args:
        corpus: Which is measured on.
        learned_from: Sources that are trained on or calibrated with.
    """
    if corpus.kind not in ("files", "hub"):
        return ()
    others = {
        source: resolve(source)
        for source in learned_from
        if resolve(source).text_of != corpus.text_of
    }
    return tuple(source for source, other in others.items() if other.kind != "synthetic")


def _paragraph_digests(text: str) -> set[bytes]:
    paragraphs = re.split(r"\n(?:[^\S\n]*\n)+", text)
    return {document_digest(part.strip()) for part in paragraphs if part.strip()}


@dataclass(frozen=True)
class PooledTokens:
    """Tokens `[n]` int32 of the first documents of a split.

    Attributes:
        first: What every sequence begins with.
        left_out: Documents that also stand in the text that it is to be apart from.
    """

    ids: np.ndarray
    documents: int
    first: list[int]
    left_out: int = 0

    def sequences(self, cut: TextCut) -> np.ndarray:
        """Return evenly spaced sequences of `cut`, `[N, T]` int32.

        Raises:
            DataError: When there is too little text.
        """
        requested = cut.sequences
        length = cut.sequence_length
        there = len(self.ids) // length
        if there < (1 if cut.at_most else requested):
            raise cut.too_few(len(self.ids), self.documents, self.left_out)
        requested = min(requested, there)
        return _begun(
            self.ids[: there * length].reshape(there, length)[
                np.arange(requested) * there // requested
            ],
            self.first,
        )


def _begun(sequences: np.ndarray, first: list[int]) -> np.ndarray:
    """Sequences `[N, T]` that begin with the tokens `first`."""
    if not first:
        return sequences
    sequences = sequences.copy()
    sequences[:, : len(first)] = first[: sequences.shape[1]]
    return sequences


def default_length(positions: int, *tokens: int) -> int:
    """Return the default tokens per sequence for a model's positions and splits of these sizes.

    LENGTH, or all that the model takes; less where the tokens would be fewer than FEWEST sequences.
    """
    length = min(LENGTH, positions)
    while length > _SHORTEST and min(tokens, default=length * FEWEST) < length * FEWEST:
        length //= 2
    return length


class LoadedTexts(NamedTuple):
    """Calibration and held-out token sequences, and where they come from.

    Attributes:
        calibration: `[N, T]` int64.
        held_out: `[N, T]` int64.
        facts: Of their source, for a record.
    """

    calibration: Tensor
    held_out: Tensor
    facts: dict[str, Any]


@dataclass(frozen=True)
class Texts:
    """Which text is calibrated or trained on (`data`), and which is measured on (`eval_data`).

    One source is for both, and is divided. Where another one is named to measure on, both are used
    whole, less the documents of `eval_data` that also stand in the first. Without any it is
    `builtin`. Token counts of None: TOKENS, or as many as there are; a sequence length of None:
    `default_length`.
    """

    data: str | None = None
    eval_data: str | None = None
    text_field: str = "text"
    seed: int = 0

    @property
    def source(self) -> str:
        """The text that is calibrated or trained on."""
        return BUILTIN if self.data is None else self.data

    @property
    def eval_source(self) -> str:
        """The text that is measured on."""
        return self.source if self.eval_data is None else self.eval_data

    @property
    def words(self) -> str:
        """The sources, for people."""
        return self.source if self.one else f"{self.source} and {self.eval_source}"

    @cached_property
    def one(self) -> bool:
        """Whether both are parts of one text. Raises DataError for a missing source."""
        return resolve(self.source).text_of == resolve(self.eval_source).text_of

    def cut(self, split: Split, tokens: int | None, length: int) -> TextCut:
        """One split.

        Raises:
            DataError: For a source that is not there, and for tokens that fill no sequence.
        """
        source = self.eval_source if split == "eval" else self.source
        corpus = resolve(source)
        apart = ()
        if split == "eval" and self.data is not None:
            apart = other_sources(corpus, [self.data])
        return TextCut(
            source,
            split,
            CALIBRATION_TOKENS if tokens is None else tokens,
            length,
            self.seed,
            self.text_field,
            ("by_size" if self.one else "whole") if corpus.divisible else "twentieth",
            apart,
            tokens is None,
        )

    def load(
        self,
        tokenizer: Any,
        positions: int,
        *,
        eval_tokens: int | None = None,
        sequence_length: int | None = None,
        calibration_tokens: int | None = None,
        calibrate: bool = True,
    ) -> LoadedTexts:
        """Both texts, for a model of so many `positions`.

        The calibration split is empty, `[0, T]`, unless it is requested (`calibrate`).

        Raises:
            DataError: For a source that is not there or has too little text.
        """
        requested: dict[Split, int | None] = {"eval": eval_tokens}
        if calibrate:
            requested["calibration"] = calibration_tokens
        length = sequence_length or default_length(
            positions, *(tokens or CALIBRATION_TOKENS for tokens in requested.values())
        )
        cuts = {split: self.cut(split, tokens, length) for split, tokens in requested.items()}
        pools = {split: cut.pooled(tokenizer) for split, cut in cuts.items()}
        if sequence_length is None:
            length = default_length(
                positions, *(min(cuts[split].tokens, len(pools[split].ids)) for split in cuts)
            )
        rows = {
            split: torch.from_numpy(
                pools[split].sequences(replace(cut, sequence_length=length))
            ).long()
            for split, cut in cuts.items()
        }
        facts = {
            **({"calibration_data": self.source} if calibrate else {}),
            "eval_data": self.eval_source,
            "eval_documents_left_out": pools["eval"].left_out,
            "sequence_length": length,
        }
        return LoadedTexts(rows.get("calibration", rows["eval"][:0]), rows["eval"], facts)


def load_sequences(
    source: str, tokenizer: Any, *, cache_dir: str | Path | None = None, **cut: Any
) -> Tensor:
    """Return the sequences of `TextCut(source, **cut)` in memory, `[N, T]` int64.

    Without `cache_dir` nothing is stored.
    """
    if cache_dir is not None:
        return read_sequences(token_set(TextCut(source, **cut), tokenizer, cache_dir))[:]
    return torch.from_numpy(TextCut(source, **cut).in_memory(tokenizer)).long()


class WritableCut(Protocol):
    """The definition of a token set."""

    def folder(self, tokenizer: Any, cache_dir: str | Path, shard_tokens: int = ...) -> Path: ...

    def write(
        self, tokenizer: Any, folder: Path, shard_tokens: int, tokenise: Tokenise, /
    ) -> None: ...


def token_set(
    cut: WritableCut,
    tokenizer: Any,
    cache_dir: str | Path,
    *,
    tokenise: Tokenise = tokenise_here,
    shard_tokens: int = SHARD_TOKENS,
) -> Path:
    """Return the folder in `cache_dir` with the sequences of `cut`, for `read_sequences`.

    Made unless it is there.

    A run that was killed is resumed. The set is the same for every `tokenise`.

    Raises:
        DataError: When there is too little text.
    """
    folder = cut.folder(tokenizer, cache_dir, shard_tokens)
    if not is_complete(folder):
        cut.write(tokenizer, folder, shard_tokens, tokenise)
    return folder


class BatchStream:
    """Endless shuffled epochs over `sequences [N, T]`.

    `next()` gives this worker's rows of a step, `[B / W, T]` int64.

    Worker r of W gets rows ⌊r B/W⌋ to ⌊(r + 1) B/W⌋ of the step, so that all together see what one
    worker would. An epoch's remainder begins the next one's first step. The state is a position, so
    resuming is exact, with any W. Of a set on disk only this worker's rows are read; memory holds
    the order of one epoch, 8 N bytes.
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
            raise ValueError(
                f"sequences must be [N, T] with at least one row, got shape "
                f"{tuple(sequences.shape)}"
            )
        if batch_size < max(1, world_size):
            raise ValueError(
                f"batch_size must give each of {world_size} worker(s) a sequence, got {batch_size}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        self._sequences = sequences
        self._batch_size = batch_size
        self._seed = seed
        self._mine = range(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)
        self._position = 0
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)
        self._last: tuple[list[int], Tensor] = ([], self._order)

    def next(self) -> Tensor:
        """Return the next batch, `[B, T]`."""
        rows = [self._row(self._position + row) for row in self._mine]
        self._position += self._batch_size
        batch = self._sequences[rows].long()
        self._last = rows, batch
        return batch

    def rows_of(self, ids: Tensor) -> list[int]:
        """Return which rows of the sequences `ids` `[B, T]` are, of those of the last batch."""
        rows = {row.numpy().tobytes(): number for number, row in zip(*self._last, strict=True)}
        return [rows[row.numpy().tobytes()] for row in ids.cpu()]

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._sequences))
        if epoch != self._epoch:
            # a separate seed for each (seed, epoch), so that a position can be reached without the
            # earlier ones
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch = epoch
            self._order = torch.randperm(len(self._sequences), generator=generator)
        return int(self._order[offset])

    def skip(self, sequences: int) -> None:
        """Leave out the next sequences."""
        self._position += sequences

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, as plain values."""
        return {"position": self._position, "seed": self._seed, "sequences": len(self._sequences)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ValueError: For a state of another seed or of other data.
        """
        for name, value in (("seed", self._seed), ("sequences", len(self._sequences))):
            if state[name] != value:
                raise ValueError(
                    f"the stream's {name} must be {value}, as here, got {state[name]}; start a new "
                    f"stream instead"
                )
        self._position = int(state["position"])
