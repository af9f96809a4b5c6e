"""One pass over tokens -> per-layer statistics; content-addressed on disk and shared by all trials of a search.

Legend: L layers, H query heads, d head dim, D model dim, B sequences a batch, T tokens a sequence.

The pass reads two things in each attention module: its input x (a forward pre-hook) and the queries and keys after RoPE
(an attention function of our own, registered with transformers), from which it has the attention weights. Only one
layer's weights of one batch live at a time, so the memory does not grow with the tokens. With S stored inputs and
E = D + 1 the statistics take `L (8 E^2 + 4 E^2 H + 8 H d^2 + 4 D S)` bytes; while the pass runs, one layer of one batch
adds `4 B T (2 H T + 3 E)` to it and to the model's own activations.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel

from attention.calibration.collecting import collecting
from attention.calibration.moments import Calibration, CalibrationError
from attention.families import geometry_of
from attention.geometry import HeadGeometry
from attention.modeling.modeling import plan_of
from attention.modeling.running import evaluating

SAMPLE_TOKENS = 16_384
ProgressFn = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """A progress callback that shows nothing."""


def calibrate(
    model: PreTrainedModel,
    sequences: Tensor,
    *,
    sample_tokens: int = SAMPLE_TOKENS,
    batch_size: int = 8,
    progress: ProgressFn | None = None,
) -> Calibration:
    """Statistics of every layer of `model` over `sequences` (`[N, T]` token ids, no padding), on the CPU.

    `sample_tokens` bounds the stored inputs (whole sequences, from the first on; 0 stores none). The model runs in its
    own dtype and evaluation mode, without gradients, and is left as it was; sums are taken in float32 and collected in
    float64 (the mixed moments in float32). `progress(done, total)` counts sequences; by default a line on stderr.

    Raises ValueError if the tokens do not fit the model, for an unsupported model and for a composed one.
    """
    geometry = geometry_of(model.config)
    check_sequences(sequences, geometry, sample_tokens)
    if plan_of(model).composition is not None:
        raise ValueError(
            "a composed model (dcmha) cannot be calibrated: its attention weights are mixed across heads; "
            "calibrate the checkpoint that it was converted from"
        )
    sampled = min(sample_tokens // sequences.shape[1], len(sequences))
    batches = sequences.split(batch_size)
    with collecting(model, geometry, sampled) as collectors, evaluating(model), _shown(progress) as show:
        done = 0
        show(0, len(sequences))
        for batch in batches:
            # The decoder alone: logits over the vocabulary are not needed and would be the largest tensor of all.
            model.get_decoder()(input_ids=batch.to(model.device), use_cache=False)
            done += len(batch)
            show(done, len(sequences))
        layers = tuple(collector.finish() for collector in collectors)
    return Calibration(layers, sequences.numel(), calibration_digest(model, sequences, sample_tokens))


def cached_calibration(
    model: PreTrainedModel,
    sequences: Tensor,
    cache_dir: str | Path,
    *,
    progress: ProgressFn | None = None,
) -> Calibration:
    """`calibrate`, kept under `cache_dir` by the digest of weights and tokens.

    Files that are damaged or belong to another digest are made anew. Several processes may call it at once: each
    writes the same content in one step. Raises as `calibrate` does, and OSError if the folder cannot be written.
    """
    geometry = geometry_of(model.config)
    check_sequences(sequences, geometry, SAMPLE_TOKENS)
    digest = calibration_digest(model, sequences, SAMPLE_TOKENS)
    folder = Path(cache_dir) / f"calibration-{digest}"
    if folder.exists():
        try:
            kept = Calibration.load(folder)
            if kept.digest == digest:
                return kept
            print(f"{folder} holds calibration {kept.digest}, expected {digest}; calibrating again", file=sys.stderr)
        except CalibrationError as error:
            print(f"{error}: calibrating again", file=sys.stderr)
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=cache_dir):  # a folder that cannot be written is better known before the pass
        pass
    made = calibrate(model, sequences, progress=progress)
    made.save(folder)
    return made


def calibration_digest(model: PreTrainedModel, sequences: Tensor, sample_tokens: int) -> str:
    """Digest of all that a calibration depends on: weights, config, tokens, settings. 16 hex digits.

    The batch size is left out: it changes the result by rounding alone.
    """
    digest = hashlib.blake2b(digest_size=8)
    config = {
        k: v for k, v in model.config.to_diff_dict().items() if k not in ("transformers_version", "_name_or_path")
    }
    settings = {"sample_tokens": sample_tokens, "shape": list(sequences.shape), "config": config}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in (*model.named_parameters(), ("tokens", sequences.long())):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_sequences(sequences: Tensor, geometry: HeadGeometry, sample_tokens: int = 0) -> None:
    """Raise ValueError naming what is wrong if `sequences` is not `[N, T]` token ids that the model can take."""
    if sequences.dim() != 2 or sequences.dtype not in (torch.int64, torch.int32) or sequences.numel() == 0:
        raise ValueError(
            f"sequences must be a non-empty [N, T] tensor of token ids, got shape {tuple(sequences.shape)} of "
            f"{sequences.dtype}"
        )
    length = sequences.shape[1]
    if length > geometry.max_positions:
        raise ValueError(
            f"sequences of {length} tokens are longer than the model's {geometry.max_positions}; pack shorter ones"
        )
    low, high = int(sequences.min()), int(sequences.max())
    if low < 0 or high >= geometry.vocab_size:
        raise ValueError(
            f"token ids must lie in [0, {geometry.vocab_size - 1}], got {low} to {high}; use the model's own tokenizer"
        )
    if sample_tokens < 0 or 0 < sample_tokens < length:
        raise ValueError(f"sample_tokens must be 0 or hold a sequence of {length} tokens, got {sample_tokens}")


@contextmanager
def _shown(progress: ProgressFn | None) -> Iterator[ProgressFn]:
    """The given callback, or a line on stderr with the time left."""
    if progress is not None:
        yield progress
        return
    columns = (TextColumn("calibrating"), BarColumn(), MofNCompleteColumn(), TextColumn("sequences"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("calibrating", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
