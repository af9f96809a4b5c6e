"""Caches in the formats of engines: bytes, and losses by our runtime and by llama.cpp.

    python -m benchmarks.cache_formats MODEL [--data TEXT | --eval-data TEXT] [--file MODEL.gguf]

prints the table of one model; as the benchmark `cache_formats` it is of the demo checkpoint. With `--scales` it prints
what scales of each layer, calibrated on the training side of the text, gain for fp8 over the scale 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from attention.cache_formats import LLAMA_CPP, CachePair
from attention.engine_cache import engine_cache, with_engine_heads
from attention.io.export import export
from attention.io.targets import EngineSupport
from attention.modeling.growing_cache import cache_of
from attention.modeling.model_classes import plan_of
from attention.modeling.rounded_cache import FP8_MOST, Scales, round_numbers
from benchmarks.report import Row, Scale, benchmark
from orchestrator import checkpoints
from orchestrator.serving.engine import ScoreQuestion
from orchestrator.serving.llama_cpp import find, score
from orchestrator.storage.shipped import shipped
from trainers.evaluation import comparison, evaluate
from trainers.text.data import Texts

FORMATS = ("f16", "q8_0", "fp8", "q8_0,q5_1", "q8_0,q4_0", "q5_1", "q4_0")
SECONDS = 7200  # that llama.cpp may take for one format
CALIBRATION_TOKENS = 2048  # for the scales of fp8
ARBITRARY = 0.7  # a scale that is not calibrated: how far the loss moves by another rounding alone
STEPS = [2 ** (-step / 4) for step in range(8)]  # of scales that are tried, down from that of the largest number


@dataclass(frozen=True)
class Losses:
    """The loss on some tokens, and its increase over that with a 16-bit cache, with its standard error."""

    loss: float
    increase: float
    error: float | None

    @classmethod
    def of(cls, losses: Tensor, reference: Tensor) -> Losses:
        """Of losses by token, `[N, T]`; those that are not a number in either are left out."""
        read = ~(losses.isnan() | reference.isnan())
        means = [
            torch.stack([each[row].mean() for each, row in zip(x, read, strict=True)]) for x in (losses, reference)
        ]
        loss, before = (float(x[read].mean()) for x in (losses, reference))
        compared = comparison(loss, before, *means)
        return cls(loss, compared["loss_increase"], compared["loss_increase_stderr"])

    def __str__(self) -> str:
        return f"{self.increase:+.4f}" + ("" if self.error is None else f" ± {self.error:.4f}")


@dataclass(frozen=True)
class Measured:
    """One format. `ours` and `theirs` are on the same sequences, `whole` on all.

    Attributes:
        share: Of the bytes in 16 bits.
        apart: Root mean square of the differences of log-probabilities, ours to theirs.
    """

    pair: CachePair
    share: float
    whole: Losses
    ours: Losses | None = None
    theirs: Losses | None = None
    apart: float | None = None


def measured(
    model: torch.nn.Module, sequences: Tensor, formats: Sequence[str], exported: Path | None, few: Tensor
) -> Iterator[Measured]:
    """Yield each format, in our runtime on `sequences`, and in llama.cpp on `few` if there is an export."""
    plan = plan_of(model)  # type: ignore[arg-type]
    support = EngineSupport.of([layer.key_heads for layer in plan.layers], plan.head_dim)
    reference: dict[str, Tensor] = {}
    for name in dict.fromkeys(["f16", *formats]):  # the first is the reference of the others
        pair = CachePair.parse(name)
        share = pair.bytes_per_token(plan) / plan.kv_bytes_per_token("float16")
        with engine_cache(model, pair):  # type: ignore[arg-type]
            whole = _losses(model, sequences)
            ours = _losses(model, few)
        entry = Measured(pair, share, Losses.of(whole, reference.setdefault("whole", whole)))
        if exported is not None and LLAMA_CPP in pair.engines:
            question = ScoreQuestion(exported, few.tolist(), "float32", support, pair, SECONDS)
            scored = score(find(None), question).log_probabilities
            theirs = -torch.tensor([[float("nan") if x is None else x for x in row] for row in scored]).double()
            read = ~theirs.isnan()
            entry = Measured(
                pair,
                share,
                entry.whole,
                Losses.of(torch.where(read, ours, theirs), reference.setdefault("ours", ours)),
                Losses.of(theirs, reference.setdefault("theirs", theirs)),
                float((ours - theirs)[read].square().mean().sqrt()),
            )
        yield entry


def calibrated(model: torch.nn.Module, sequences: Tensor) -> dict[str, list[Scales]]:
    """Return scales of fp8 for each layer, by how they were chosen on some text; print the error that each leaves."""
    fp8 = CachePair.parse("fp8").keys
    held: list[list[Tensor]] = []
    with torch.no_grad():
        for row in sequences.split(1):
            layers = cache_of(model(row, use_cache=True)).layers
            held.append([each.flatten() for layer in layers for each in (layer.keys, layer.values)])
    sides = [torch.cat(parts) for parts in zip(*held, strict=True)]

    def error(x: Tensor, scale: float) -> float:
        return float((round_numbers(x, fp8, scale) - x).square().sum())

    largest = [float(x.abs().max()) / FP8_MOST for x in sides]
    least = [
        min((1.0, *(most * step for step in STEPS)), key=lambda scale, x=x: error(x, scale))
        for x, most in zip(sides, largest, strict=True)
    ]
    chosen = {
        "1": [1.0] * len(sides),
        f"{ARBITRARY}, arbitrary": [ARBITRARY] * len(sides),
        "largest / 448": largest,
        "least squared error": least,
    }
    for name, scales in chosen.items():
        left = [
            sum(error(x, scale) for x, scale in zip(sides[side::2], scales[side::2], strict=True))
            / sum(float(x.square().sum()) for x in sides[side::2])
            for side in (0, 1)
        ]
        print(f"scale {name}: squared error {left[0]:.3e} of the keys' squares, {left[1]:.3e} of the values'")
    return {
        name: [Scales(*pair) for pair in zip(scales[::2], scales[1::2], strict=True)] for name, scales in chosen.items()
    }


def print_scales(model: torch.nn.Module, calibration: Tensor, sequences: Tensor) -> None:
    """Print the loss with fp8 under each choice of scales, over that of 16 bits and over that of the scale 1."""
    chosen = calibrated(model, calibration)
    with engine_cache(model, CachePair.parse("f16")):  # type: ignore[arg-type]
        exact = _losses(model, sequences)
    plain: Tensor | None = None
    print("\n| fp8 with scale | loss increase | over scale 1 |\n|---|---|---|")
    for name, scales in chosen.items():
        with engine_cache(model, CachePair.parse("fp8"), scales=scales):  # type: ignore[arg-type]
            losses = _losses(model, sequences)
        plain = losses if plain is None else plain
        over = "" if plain is losses else str(Losses.of(losses, plain))
        print(f"| {name} | {Losses.of(losses, exact)} | {over} |", flush=True)


def _losses(model: torch.nn.Module, sequences: Tensor) -> Tensor:
    losses = evaluate(model, sequences).token_losses
    assert losses is not None
    return losses


def _export(path: str, folder: str) -> Path:
    export(path, "gguf", Path(folder) / "gguf", path, dtype="float32")
    return Path(folder) / "gguf"


def _linked(file: Path, folder: str) -> Path:
    """Return a folder that has the file under the name of an export."""
    (Path(folder) / "model.gguf").symlink_to(file.absolute())
    return Path(folder)


@benchmark("cache_formats", devices=("cpu",))
def cache_formats(scale: Scale) -> Iterator[Row]:
    """The demo checkpoint's loss in each cache format, by our runtime and by llama.cpp."""
    path = str(shipped("examples/stdlib-llama/config.json").parent)
    opened = checkpoints.open_checkpoint(path)
    texts = Texts("stdlib", None, "text", 0).load(
        opened.tokenizer, 512, eval_tokens=scale.pick(512, 8192), sequence_length=256, calibrate=False
    )
    model = checkpoints.load_model(opened)
    few = texts.held_out[:2, : scale.pick(32, 256)]
    with tempfile.TemporaryDirectory() as folder:
        exported = _export(path, folder)
        for entry in measured(model, texts.held_out, scale.pick(("f16", "q4_0"), FORMATS), exported, few):
            note = f"{entry.share:.1%} of the bytes; increase {entry.whole}"
            if entry.theirs is None or entry.ours is None:
                yield Row(entry.pair.name, entry.whole.loss, None, "nats", note)
                continue
            note += f"; on the tokens of llama.cpp: ours {entry.ours}, its {entry.theirs}"
            yield Row(entry.pair.name, entry.ours.loss, entry.theirs.loss, "nats", note)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="folder, GGUF file or hub name")
    parser.add_argument("--data", help="text whose held-out part is measured on")
    parser.add_argument("--eval-data", help="text that is measured on as a whole")
    parser.add_argument("--tokens", type=int, default=6144)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--file", type=Path, help="GGUF file for llama.cpp (default: exported in float32); - for none")
    parser.add_argument("--engine-sequences", type=int, default=4, help="of them in llama.cpp, one token at a time")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--scales", action="store_true", help="measure scales of fp8 instead of formats")
    given = parser.parse_args(words)
    opened = checkpoints.open_model(given.model, "model")
    texts = Texts(given.data, given.eval_data, "text", 0).load(
        opened.tokenizer,
        opened.geometry.max_positions,
        eval_tokens=given.tokens,
        sequence_length=given.sequence_length,
        calibration_tokens=CALIBRATION_TOKENS,
        calibrate=given.scales,
    )
    model = with_engine_heads(checkpoints.load_model(opened))
    if given.scales:
        print_scales(model, texts.calibration, texts.held_out)
        return
    few = texts.held_out[: given.engine_sequences]
    count = f"{texts.held_out.numel():,} tokens of {texts.facts['eval_data']}, sequences of {given.sequence_length}"
    print(f"{count}; of llama.cpp the first {few.numel():,}\n")
    print("| cache | bytes | loss increase | on those tokens | in llama.cpp | apart (rms) |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        exported = None
        if str(given.file) != "-":
            exported = _linked(given.file, folder) if given.file else _export(opened.path, folder)
        for entry in measured(model, texts.held_out, given.formats, exported, few):
            cells = [str(x) if x is not None else "" for x in (entry.ours, entry.theirs)]
            apart = "" if entry.apart is None else f"{entry.apart:.4f}"
            row = [entry.pair.name, f"{entry.share:.1%}", str(entry.whole), *cells, apart]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
