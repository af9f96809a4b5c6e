"""Text to token sequences: tokenise, join with the end token, cut to equal length, keep on disk, batch.

Legend: N sequences, T tokens a sequence, B sequences a step over all workers, W workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention.io.files import written_whole
from trainers.text.corpora import Corpus, DataError, resolve

Split = Literal["train", "eval", "calibration"]
POOL = 4_000_000  # tokens of text at most from which evaluation and calibration sequences are spaced evenly
CALIBRATION_SPREAD = 64  # calibration keeps one sequence in so many: few long documents must not stand for all
CALIBRATION_SEED = 1  # added to the seed: calibration takes other documents first than training does
DOCUMENTS_AT_ONCE = 256


def load_sequences(source: str, tokenizer: Any, *, cache_dir: str | Path | None = None, **cut: Any) -> Tensor:
    """The sequences of `sequence_file(source, tokenizer, **cut)`, `[N, T]` int64; without `cache_dir` none are kept."""
    if cache_dir is not None:
        return read_sequences(sequence_file(source, tokenizer, cache_dir=cache_dir, **cut))
    return _build(resolve(source), tokenizer, **cut).long()


def sequence_file(
    source: str,
    tokenizer: Any,
    *,
    split: Split,
    tokens: int,
    sequence_length: int,
    seed: int = 0,
    cache_dir: str | Path,
    text_field: str = "text",
) -> Path:
    """A file in `cache_dir` with the token sequences of one split of a source (see `trainers.text.corpora`), `[N, T]`
    with N = tokens // T; its name holds everything that they depend on, so it is built once.

    `train` and `calibration` come from the training side, documents shuffled by `seed` (each with its own order), the
    calibration evenly spaced over many documents; `eval` from the held-out side, evenly spaced over it, in fixed order
    whatever the seed. Raises DataError when there is too little text.
    """
    _check(split, tokens, sequence_length)
    corpus = resolve(source)
    key = [corpus.source, corpus.fingerprint, tokenizer_digest(tokenizer), split, tokens, sequence_length, text_field]
    key += [None if split == "eval" else seed, CALIBRATION_SPREAD if split == "calibration" else None]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    file = Path(cache_dir) / f"{split}-{name}.safetensors"
    if not file.exists():
        write_sequences(_build(corpus, tokenizer, split, tokens, sequence_length, seed, text_field), file)
    return file


def check_source(source: str, split: Split, tokens: int, sequence_length: int) -> None:
    """What can be known before a text is read. Raises DataError as `sequence_file` does."""
    _check(split, tokens, sequence_length)
    resolve(source)


def write_sequences(sequences: Tensor, file: str | Path) -> None:
    """Save `[N, T]` token ids as int32, atomically: a reader sees the whole file or none."""
    with written_whole(file) as fresh:
        save_file({"sequences": sequences.to(torch.int32).contiguous()}, fresh)


def read_sequences(file: str | Path, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """The `[N, T]` token ids of a file by `write_sequences`. With int32 the tensor is mapped, not read, into memory."""
    path = Path(file)
    if not path.is_file():
        raise DataError(f"expected a file of token sequences, found nothing at {path}; build it with sequence_file()")
    return load_file(path)["sequences"].to(dtype)


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of all that decides how a tokenizer cuts text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(f"{type(tokenizer).__name__}|{tokenizer.eos_token_id}|{state}".encode()).hexdigest()


def _check(split: str, tokens: int, sequence_length: int) -> None:
    if split not in get_args(Split):
        raise DataError(f"split must be one of {get_args(Split)}, got {split!r}")
    if sequence_length < 2:
        raise DataError(f"sequence_length must be at least 2 (one token predicts the next), got {sequence_length}")
    if tokens < sequence_length:
        raise DataError(f"{split}: {tokens} tokens do not fill one sequence of {sequence_length}; raise tokens")


def _build(
    corpus: Corpus,
    tokenizer: Any,
    split: Split,
    tokens: int,
    sequence_length: int,
    seed: int = 0,
    text_field: str = "text",
) -> Tensor:
    _check(split, tokens, sequence_length)
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end token to join documents with; set tokenizer.eos_token")
    order = None if split == "eval" else seed + (CALIBRATION_SEED if split == "calibration" else 0)
    texts = corpus.documents("held_out" if split == "eval" else "train", text_field, order)
    length, wanted = sequence_length, tokens // sequence_length
    pool = max(tokens, {"train": 0, "eval": POOL, "calibration": min(POOL, CALIBRATION_SPREAD * tokens)}[split])
    ids, documents = _tokenise(texts, tokenizer, pool)
    there = ids.numel() // length
    if there < wanted:
        raise DataError(
            f"{corpus.source}: {split} needs {wanted} sequences of {length} tokens ({wanted * length}), found {there} "
            f"({ids.numel()} tokens in {documents} documents); ask for fewer tokens or give more text"
        )
    sequences = ids[: there * length].view(there, length)
    if split != "train":
        sequences = sequences[torch.arange(wanted) * there // wanted]
    return sequences[:wanted].clone()


def _tokenise(texts: Iterator[str], tokenizer: Any, limit: int) -> tuple[Tensor, int]:
    """Ids of all documents, each followed by the end token, until `limit` is reached; int32, and the document count."""
    pieces = [torch.empty(0, dtype=torch.int32)]
    total = documents = 0
    while total < limit and (batch := list(islice(texts, DOCUMENTS_AT_ONCE))):
        # verbose=False: a document may be longer than the model's context, since it is cut afterwards
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            pieces.append(torch.tensor([*ids, tokenizer.eos_token_id], dtype=torch.int32))
            total += pieces[-1].numel()
        documents += len(batch)
    return torch.cat(pieces), documents


class BatchStream:
    """Endless shuffled epochs over `sequences [N, T]`: `next()` gives this worker's rows of a step, `[B / W, T]` int64.

    Worker r of W gets rows r B/W to (r + 1) B/W of the step, so that all together see what one worker would. An epoch's
    remainder begins the next one's first step. The state is a position, so resuming is exact, with any W.
    """

    def __init__(
        self, sequences: Tensor, batch_size: int, *, rank: int = 0, world_size: int = 1, seed: int = 0
    ) -> None:
        if sequences.ndim != 2 or not len(sequences):
            raise ValueError(f"sequences must be [N, T] with at least one row, got shape {tuple(sequences.shape)}")
        if batch_size < 1 or batch_size % world_size:
            raise ValueError(f"batch_size must be a multiple of the {world_size} workers, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        self._sequences, self._batch_size, self._seed = sequences, batch_size, seed
        self._share = batch_size // world_size
        self._first = rank * self._share
        self._position = 0
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def next(self) -> Tensor:
        start = self._position + self._first
        rows = [self._row(position) for position in range(start, start + self._share)]
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
