"""A teacher's predictions for a token set, stored on disk: the likeliest tokens of each position.

They are computed once for a token set, a teacher and a k, by the first training that needs them,
and stored next to the token set for all later ones, which then load no teacher. Stored for each
position are the k largest log-probabilities and the joint probability of the other tokens.

    00000.safetensors ...   `indices` `[S, T - 1, k]`, `log_probabilities` `[S, T - 1, k]`,
                            `log_rest` `[S, T - 1]`
    index.json              what they are of, and their digest (written last)

Legend: N sequences, T tokens per sequence, S sequences per shard, k tokens per position,
V vocabulary, B sequences at once, W workers.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from attention.base.products import exact_products
from attention.base.progress import stage
from attention.checkpoint import Checkpoint
from attention.io import checkpoint
from attention.io.files import sha256, write_whole, written_whole
from attention.modeling.predictions import Final, final, positions_at_once
from attention.modeling.running import batch_of, evaluating
from trainers.jobs.checkpoints import of_rank_0
from trainers.jobs.share import teacher_of
from trainers.jobs.train_job import TrainJob
from trainers.text.data import BatchStream
from trainers.text.token_sets import TokenSequences, read_sequences, shard_file

_FORMAT = 1
_SHARD_BYTES = 2**26
_INDEX = "index.json"


class StoredTeacher:
    """The predictions of a teacher for the sequences of a stream's last batch, from disk.

    All workers open it together.

    Attributes:
        digest: Of all stored data.
    """

    def __init__(self, folder: Path, stream: BatchStream) -> None:
        index = of_rank_0(lambda: json.loads((folder / _INDEX).read_text(encoding="utf-8")))
        self.digest = str(index["digest"])
        self._folder = folder
        self._per_shard = int(index["sequences_per_shard"])
        self._vocabulary = int(index["vocabulary"])
        self._stream = stream

    def __call__(self, ids: Tensor) -> Final:
        """Return the input of `trainers.losses.stored_kl`, which replaces logits.

        Args:
            ids: Sequences `[B, T]` of the stream's last batch.
        """
        rows = self._stream.rows_of(ids)
        packed = torch.stack([self._read(row) for row in rows]).to(ids.device)
        # The last token has no next token to predict
        states = torch.nn.functional.pad(packed, (0, 0, 0, 1))
        return Final(states, lambda states: states, self._vocabulary)

    def _read(self, row: int) -> Tensor:
        """Return log-probabilities, indices and the rest of a sequence, `[T - 1, 2 k + 1]`."""
        number, place = divmod(row, self._per_shard)
        with safe_open(shard_file(self._folder, number), "numpy") as shard:
            parts = [
                shard.get_slice(name)[place : place + 1][0].astype(np.float32)
                for name in ("log_probabilities", "indices", "log_rest")
            ]
        return torch.from_numpy(np.concatenate([*parts[:2], parts[2][:, None]], -1))


def _teacher_digest(job: TrainJob) -> str:
    """Return the digest of the teacher's weights, which is kept next to the text."""
    teacher = Checkpoint.open(str(job.teacher_dir)).folder
    return checkpoint.weights_digest(teacher, Path(job.train_file).parent)


def stored_teacher(job: TrainJob, stream: BatchStream, device: torch.device) -> StoredTeacher:
    """Return the predictions of a job's teacher, which are made unless they are there.

    All workers take part. Jobs that run at the same time share the work.
    """
    sequences = read_sequences(job.train_file)
    made_of = {
        "format": _FORMAT,
        "text": sequences.digest,
        "teacher": of_rank_0(lambda: _teacher_digest(job)),
        "k": job.settings.teacher_logits_k,
        "dtype": job.settings.dtype,
    }
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
    text = Path(job.train_file)
    folder = text.parent / f"{text.name}-teacher-{key}"
    if not of_rank_0((folder / _INDEX).is_file):
        with teacher_of(job, job.settings, device) as teacher:
            _Writer(folder, sequences, teacher, job, device, made_of).write()
    return StoredTeacher(folder, stream)


class _Writer:
    """Writes the shards of one worker; all workers run equally many forward passes."""

    def __init__(
        self,
        folder: Path,
        sequences: TokenSequences,
        teacher: Any,
        job: TrainJob,
        device: torch.device,
        made_of: dict[str, Any],
    ) -> None:
        self._folder = folder
        self._sequences = sequences
        self._teacher = teacher
        self._device = device
        self._made_of = made_of
        self._vocabulary = int(teacher.get_output_embeddings().out_features)
        self._k = min(job.settings.teacher_logits_k, self._vocabulary)
        self._exact = job.settings.dtype == "float32"
        self._start = zlib.crc32(job.run_name.encode())
        bytes_a_row = (sequences.shape[1] - 1) * self._k * 8
        self._per_shard = min(len(sequences), max(1, _SHARD_BYTES // bytes_a_row))

    def write(self) -> None:
        shards = -(-len(self._sequences) // self._per_shard)
        # Another job begins elsewhere, and each leaves out what the other has written meanwhile
        order = [(number + self._start) % shards for number in range(shards)]
        rank, workers = dist.get_rank(), dist.get_world_size()
        with (
            evaluating(self._teacher),
            exact_products(),
            stage("keeping the teacher's predictions", shards, "shards") as progress,
        ):
            while missing := of_rank_0(lambda: self._missing(order)):
                self._write_shard(missing[rank % len(missing)], first=rank < len(missing))
                dist.barrier()
                progress.to(shards - max(0, len(missing) - workers))
        if rank == 0:
            self._finish(shards)
        dist.barrier()

    def _missing(self, order: list[int]) -> list[int]:
        return [number for number in order if not shard_file(self._folder, number).is_file()]

    def _write_shard(self, number: int, *, first: bool) -> None:
        """Run the rows of a shard; those of the last one are repeated to as many as all have."""
        start = number * self._per_shard
        rows = list(range(start, min(start + self._per_shard, len(self._sequences))))
        padded = rows + rows[:1] * (self._per_shard - len(rows))
        parts = [part for batch in self._batches(padded) for part in self._predictions(batch)]
        if not first:
            return
        tensors = [np.concatenate(kind)[: len(rows)] for kind in zip(*parts, strict=True)]
        names = ("indices", "log_probabilities", "log_rest")
        with written_whole(shard_file(self._folder, number)) as fresh:
            save_file(dict(zip(names, tensors, strict=True)), fresh)

    def _batches(self, rows: list[int]) -> Iterator[list[int]]:
        size = batch_of(self._sequences.shape[1])
        return (rows[at : at + size] for at in range(0, len(rows), size))

    def _predictions(self, rows: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield indices, log-probabilities and the rest of each sequence, `[1, T - 1, ...]`."""
        ids = self._sequences[rows].to(self._device)
        reached = final(self._teacher, ids)
        length = ids.shape[1] - 1
        states = reached.states[:, :-1].flatten(0, 1)
        chunks: list[tuple[Tensor, Tensor, Tensor]] = []
        for chunk in states.split(positions_at_once(self._vocabulary)):
            logits = reached.head(chunk).float()
            everything = logits.log_softmax(-1)
            largest, indices = everything.topk(self._k, dim=-1)
            rest = everything.scatter(-1, indices, -torch.inf).logsumexp(-1)
            chunks.append((indices, largest, rest))
        indices, largest, rest = (
            torch.cat(kind).cpu().numpy() for kind in zip(*chunks, strict=True)
        )
        index_type = np.uint16 if self._vocabulary <= 2**16 else np.uint32
        value_type = np.float32 if self._exact else np.float16
        for row in range(len(rows)):
            part = slice(row * length, (row + 1) * length)
            yield (
                indices[part].astype(index_type)[None],
                largest[part].astype(value_type)[None],
                rest[part].astype(np.float32)[None],
            )

    def _finish(self, shards: int) -> None:
        digests = [sha256(shard_file(self._folder, number)) for number in range(shards)]
        record = {
            "made_of": self._made_of,
            "sequences_per_shard": self._per_shard,
            "vocabulary": self._vocabulary,
            "digest": hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16],
        }
        write_whole(self._folder / _INDEX, json.dumps(record, indent=1) + "\n")
