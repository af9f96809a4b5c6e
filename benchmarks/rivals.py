"""Other ways to a smaller KV cache at equal bytes, compared with ours, without training.

    python -m benchmarks.rivals MODEL [--shares 0.5,0.25] [--data TEXT]

prints the table of one model; as the benchmark `rivals` it is of the demo checkpoint. None of the low-rank forms is
served: what they would cache is counted, and what they lose is measured on weights of that rank, which is the same.

- **group low rank** (Palu, Chang et al. 2024, arXiv:2407.21118): the key projections of some heads, and their value
  projections, by the product of two matrices that is closest to them on the inputs seen (singular values of W C^1/2,
  C the second moments of the inputs); the cache has the numbers between both, keys before the rotary embedding.
- **ranks by layer** (the decomposition of CARE, ICLR 2026): the same under one budget of ranks for all layers and both
  sides, which go where the largest relative singular values are.
- **a cache format alone**: what the engines' switches do.

Eviction (H2O, SnapKV) drops tokens and not numbers of a token: it multiplies with all of these.

Legend: D model dim, g heads of a group, d head dim, r rank.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.cache_formats import OFFERED, CacheFormatError, format_record
from attention.calibration.store import Calibration
from attention.engine_cache import engine_cache
from attention.families import family_of, geometry_of
from attention.heads import LayerHeads
from benchmarks.combinations import budget_of, conversion, model_parser, shares_of, sizes_of
from benchmarks.report import Row, Scale, benchmark
from orchestrator.config.options import ConvertOptions
from orchestrator.conversion.memory_store import MemoryStore
from orchestrator.storage.shipped import shipped
from orchestrator.tasks.convert import Convert
from search_spaces.recipes.catalogue import recipe
from trainers.evaluation import evaluate

GROUP = 4
"""Heads that Palu factors together."""
OURS = ("least_squares", "headfold_gqa", "headfold_layers", "headfold_wide")


@dataclass(frozen=True)
class Factored:
    """The projections of one group of one side of a layer, `[g d, D]`, under the moments of their inputs.

    Attributes:
        rows: W.
        left: Left singular vectors of W C^1/2, `[g d, g d]`.
        values: Its singular values, `[g d]`.
    """

    rows: Tensor
    left: Tensor
    values: Tensor

    @classmethod
    def of(cls, rows: Tensor, moment: Tensor) -> Factored:
        """Factor `[g d, D]` under the second moments `[D, D]` of its inputs."""
        energies, vectors = torch.linalg.eigh(moment.double())
        root = vectors * energies.clamp_min(0).sqrt()
        left_vectors, values, _ = torch.linalg.svd(rows.double() @ root, full_matrices=False)
        return cls(rows, left_vectors, values)

    def of_rank(self, rank: int) -> Tensor:
        """Return the closest `[g d, D]` of this rank: the projection on the leading left singular vectors."""
        basis = self.left[:, :rank]
        return (basis @ (basis.T @ self.rows.double())).to(self.rows.dtype)


def factor(model: PreTrainedModel, calibration: Calibration) -> list[dict[str, list[Factored]]]:
    """Return the factors of each layer's keys and values, group by group."""
    family, geometry = family_of(model.config), geometry_of(model.config)
    factors = []
    for module, layer in zip(family.attention_modules(model), calibration.layers, strict=True):
        moment = layer.input_moment[:-1, :-1]
        heads = family.read(module, geometry)
        factors.append(
            {
                side: [Factored.of(group.flatten(0, 1), moment) for group in getattr(heads, side).split(GROUP)]
                for side in ("k", "v")
            }
        )
    return factors


def equal_ranks(factors: list[dict[str, list[Factored]]], share: float) -> dict[tuple[int, str, int], int]:
    """Return the same share of its dims as the rank of every group."""
    return {key: max(1, int(share * len(each.values) + 1e-9)) for key, each in _groups(factors)}


def ranks_by_layer(factors: list[dict[str, list[Factored]]], share: float) -> dict[tuple[int, str, int], int]:
    """Return ranks under one budget: the largest singular values, each relative to its group's power."""
    groups = dict(_groups(factors))
    total = int(share * sum(len(each.values) for each in groups.values()) + 1e-9)
    candidates = [
        (float(value**2 / each.values.square().sum()), key) for key, each in groups.items() for value in each.values[1:]
    ]
    chosen = dict.fromkeys(groups, 1)
    for _, key in sorted(candidates, reverse=True)[: max(0, total - len(groups))]:
        chosen[key] += 1
    return chosen


def _groups(factors: list[dict[str, list[Factored]]]) -> Iterator[tuple[tuple[int, str, int], Factored]]:
    for layer, sides in enumerate(factors):
        for side, groups in sides.items():
            for index, each in enumerate(groups):
                yield (layer, side, index), each


def low_rank(
    model: PreTrainedModel, factors: list[dict[str, list[Factored]]], ranks: dict[tuple[int, str, int], int]
) -> PreTrainedModel:
    """Return a copy of a model with projections of these ranks."""
    family, geometry = family_of(model.config), geometry_of(model.config)
    changed = copy.deepcopy(model)
    for layer, module in enumerate(family.attention_modules(changed)):
        heads: LayerHeads = family.read(module, geometry)
        for side in ("k", "v"):
            rows = [each.of_rank(ranks[layer, side, index]) for index, each in enumerate(factors[layer][side])]
            whole = torch.cat(rows).view_as(getattr(heads, side))
            heads = heads.changed((side,), lambda _, whole=whole: whole)
        with torch.no_grad():
            family.write(module, heads)
    return changed


@dataclass(frozen=True)
class Result:
    """Loss increase of a changed model, nats per token.

    Attributes:
        name: Of the change.
        share: What it is compared by: of the bytes of the cache, or of the weights, that it takes or saves.
        increase: Of the held-out loss over the original's.
        error: Standard error of the paired difference.
    """

    name: str
    share: float
    increase: float
    error: float | None

    @classmethod
    def of(cls, store: MemoryStore, name: str, share: float, model: PreTrainedModel) -> Result:
        """Measure a model on the held-out text of a store."""
        compared = evaluate(model, store.texts.held_out).compared(store.original_evaluation)
        return cls(name, share, compared["loss_increase"], compared["loss_increase_stderr"])

    def row(self, name: str, whole: str) -> Row:
        """Return the row of a benchmark; `whole` is what the share is of."""
        error = "" if self.error is None else f" ± {self.error:.4f}"
        note = f"{self.share:.1%} of {whole}; increase {self.increase:+.4f}{error}"
        return Row(name, max(1e-6, self.increase), None, "nats", note)

    def __str__(self) -> str:
        deviation = "" if self.error is None else f" ± {self.error:.4f}"
        return f"| {self.name} | {self.share:.1%} | {self.increase:+.4f}{deviation} |"


def measured(model: str, shares: Sequence[float], ours: Sequence[str], **sizes: Any) -> Iterator[Result]:
    """Yield all ways on one model, from one calibration.

    Args:
        model: Folder, GGUF file or hub name.
        shares: Of the bytes of its cache in 16 bits.
        ours: Recipes, each as it is and without its local fit.
        sizes: Options of `headfold convert` on texts and their sizes.
    """
    task = Convert(ConvertOptions(model=model, recipe="headfold_gqa", kv_ratio=list(shares), layerwise=False, **sizes))
    store = MemoryStore(task.request, always_calibrate=True)
    calibration = store.context.calibration
    assert calibration is not None

    result = partial(Result.of, store)
    for pair in OFFERED:
        try:
            share = format_record(pair, task.request.checkpoint.plan)["share"]
        except CacheFormatError:
            continue
        with engine_cache(store.original, pair):
            yield result(f"cache format {pair.name} alone", share, store.original)
    factors = factor(store.original, calibration)
    dims = sum(len(each.values) for _, each in _groups(factors))
    for share in shares:
        for name, choose in (("group low rank (Palu)", equal_ranks), ("ranks by layer (CARE)", ranks_by_layer)):
            ranks = choose(factors, share)
            yield result(name, sum(ranks.values()) / dims, low_rank(store.original, factors, ranks))
        for each in ours:
            fitted = recipe(each)
            for label, one in ((f"{each}, no fit", fitted.with_changes(refinement="none")), (each, fitted)):
                if label == each and fitted.refinement == "none":
                    continue
                changed = conversion(store, label, one, budget_of(store, one, share))
                yield result(label, changed.heads, changed.model)


@benchmark("rivals", devices=("cpu",))
def rivals(scale: Scale) -> Iterator[Row]:
    """Measure the losses of other ways to the same bytes on the demo checkpoint."""
    path = str(shipped("examples/stdlib-llama/config.json").parent)
    sizes = {"calibration_tokens": scale.pick(1024, 8192), "eval_tokens": scale.pick(512, 8192)}
    ours = scale.pick(("least_squares",), OURS)
    for each in measured(path, scale.pick([0.5], [0.5, 0.25]), ours, sequence_length=256, **sizes):
        yield each.row(each.name, "the bytes")


def main(words: Sequence[str] | None = None) -> None:
    parser = model_parser(__doc__ or "", "of the bytes of its cache in 16 bits")
    parser.add_argument("--recipes", nargs="*", default=list(OURS))
    arguments = parser.parse_args(words)
    print("| | bytes | loss increase |\n|---|---|---|", flush=True)
    for each in measured(arguments.model, shares_of(arguments), arguments.recipes, **sizes_of(arguments)):
        print(each, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
