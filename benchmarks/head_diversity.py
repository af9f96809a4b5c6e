"""How many directions the heads of a layer use together, of one model or several (Xiao 2024, Fig. 5).

    python -m benchmarks.head_diversity MODEL [MODEL ...]

prints the share of the squared singular values that the largest ones have, as a mean over the layers, of two matrices
`[D, D]` per layer: the sum over the heads of W_Q^T W_K (QK), and of W_O W_V (OV). A low share means diverse heads. The
paper cites Cordonnier et al. 2020 (arXiv:2006.16362), who define the matrices as the product of the heads' concatenated
projections, which is this sum. Rotary embedding and composition are not in the matrices, as in the paper.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.checkpoint import Checkpoint
from attention.conversion.convert import LiftedHeads, build
from attention.heads import LayerHeads
from benchmarks.report import Row, Scale, benchmark
from orchestrator.storage.shipped import shipped

FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of all singular values, the largest."""


def circuits(heads: LayerHeads) -> dict[str, Tensor]:
    """Return the QK and the OV matrix of one layer, `[D, D]`, from heads with one key and value head each."""
    return {
        "QK": torch.einsum("hdi,hdj->ij", heads.q, heads.k),
        "OV": torch.einsum("hid,hdj->ij", heads.o, heads.v),
    }


def captured_share(matrix: Tensor, fraction: float) -> float:
    """Return the share of the squared singular values that the largest ones have, from 0 to 1.

    Args:
        matrix: `[D, D]`.
        fraction: Of the D singular values; at least one is counted.
    """
    squares = torch.linalg.svdvals(matrix.double()).square()
    return float(squares[: max(1, round(fraction * len(squares)))].sum() / squares.sum())


def captured_shares(model: PreTrainedModel) -> dict[str, list[float]]:
    """Return the captured shares of QK and OV at each of `FRACTIONS`, each a mean over the layers."""
    layers = [circuits(heads) for heads in LiftedHeads(model)]
    return {
        name: [sum(captured_share(layer[name], part) for layer in layers) / len(layers) for part in FRACTIONS]
        for name in ("QK", "OV")
    }


@benchmark("head-diversity", devices=("cpu",))
def head_diversity(_: Scale) -> Iterator[Row]:
    """Directions that the heads of the demo checkpoint use, compared with random weights."""
    checkpoint = Checkpoint.open(shipped("examples/stdlib-llama/config.json").parent)
    trained = captured_shares(checkpoint.load(torch.float32))
    random = captured_shares(build(checkpoint.config, checkpoint.plan))
    for name, shares in trained.items():
        for part, ours, rival in zip(FRACTIONS, shares, random[name], strict=True):
            yield Row(f"{name}, {part:.0%} of the directions", ours, rival, "share", "rival: random weights")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder, GGUF file or hub name")
    columns = " | ".join(f"{part:.0%}" for part in FRACTIONS)
    print(f"| model | matrix | {columns} of the directions |\n|---|---|{'---|' * len(FRACTIONS)}")
    for path in parser.parse_args(words).models:
        for name, values in captured_shares(Checkpoint.open(path).load(torch.float32)).items():
            print(f"| {path} | {name} | {' | '.join(f'{value:.3f}' for value in values)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
