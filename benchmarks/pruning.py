"""Shared heads compared with pruning by magnitude at as many parameters, without training (Cao 2024).

    python -m benchmarks.pruning MODEL [--shares 0.1,0.2,0.3,0.4] [--data TEXT]

prints the table of one model; as the benchmark `pruning` it is of the demo checkpoint. DirectShare saves the query, key
and value weights of the share alpha of all heads. As many of these weights are set to zero instead:

- **small heads**: the heads whose query, key and value weights have the smallest norm, of all layers together;
- **small weights**: of each layer, the weights of smallest magnitude. Saves memory in a sparse format alone.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from attention.families import family_of, geometry_of
from benchmarks.combinations import conversion, model_parser, shares_of, sizes_of
from benchmarks.report import Row, Scale, benchmark
from benchmarks.rivals import Result
from orchestrator.config.options import ConvertOptions
from orchestrator.conversion.memory_store import MemoryStore
from orchestrator.storage.shipped import shipped
from orchestrator.tasks.convert import Convert
from search_spaces.recipes.catalogue import recipe
from search_spaces.sharing.matching import share_count

SIDES = ("q", "k", "v")


def without_small_heads(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return a copy in which the query, key and value weights of the `count` smallest heads are zero."""
    family, geometry = family_of(model.config), geometry_of(model.config)
    pruned = copy.deepcopy(model)
    modules = list(family.attention_modules(pruned))
    layers = [family.read(module, geometry) for module in modules]
    squares = [[getattr(heads, side).square().sum((1, 2)) for side in SIDES] for heads in layers]
    norms = torch.stack([torch.stack(sides).sum(0) for sides in squares])
    smallest = norms.flatten().argsort(stable=True)[:count]
    zero = torch.zeros(norms.numel(), dtype=torch.bool)
    zero[smallest] = True
    for module, heads, of_layer in zip(modules, layers, zero.view_as(norms), strict=True):
        mask = ~of_layer[:, None, None]
        with torch.no_grad():
            family.write(module, heads.changed(SIDES, lambda rows, mask=mask: rows * mask))
    return pruned


def without_small_weights(model: PreTrainedModel, share: float) -> PreTrainedModel:
    """Return a copy in which this share of each layer's query, key and value weights, the smallest, is zero."""
    family, geometry = family_of(model.config), geometry_of(model.config)
    pruned = copy.deepcopy(model)
    for module in family.attention_modules(pruned):
        heads = family.read(module, geometry)
        magnitudes = torch.cat([getattr(heads, side).abs().flatten() for side in SIDES])
        count = round(share * len(magnitudes))
        if not count:
            continue
        largest = magnitudes.kthvalue(count).values
        with torch.no_grad():
            family.write(module, heads.changed(SIDES, lambda rows, largest=largest: rows * (rows.abs() > largest)))
    return pruned


def measured(model: str, alphas: Sequence[float], **sizes: Any) -> Iterator[Result]:
    """Yield DirectShare and both kinds of pruning at each share of the heads.

    Args:
        model: Folder, GGUF file or hub name, with a key and a value head for each query head.
        alphas: Shares of the heads.
        sizes: Options of `headfold convert` on texts and their sizes.
    """
    task = Convert(ConvertOptions(model=model, recipe="directshare", kv_ratio=[1.0], layerwise=False, **sizes))
    store = MemoryStore(task.request, always_calibrate=True)
    plan = task.request.checkpoint.plan

    result = partial(Result.of, store)
    for alpha in alphas:
        count = share_count(alpha, plan.num_layers, plan.num_heads)
        share = count / (plan.num_layers * plan.num_heads)
        sharing = recipe("directshare").with_changes(**{"sharing.alpha": alpha})
        yield result("DirectShare", share, conversion(store, "directshare", sharing, Fraction(1)).model)
        yield result("small heads", share, without_small_heads(store.original, count))
        yield result("small weights", share, without_small_weights(store.original, share))


@benchmark("pruning", devices=("cpu",))
def pruning(scale: Scale) -> Iterator[Row]:
    """Compare the losses of shared heads and pruned ones on the demo checkpoint at equal parameters."""
    path = str(shipped("examples/stdlib-llama/config.json").parent)
    sizes = {"calibration_tokens": scale.pick(1024, 8192), "eval_tokens": scale.pick(512, 8192)}
    for each in measured(path, scale.pick([0.3], [0.1, 0.2, 0.3, 0.4]), sequence_length=256, **sizes):
        yield each.row(f"{each.name}, {each.share:.0%}", "query, key and value weights")


def main(words: Sequence[str] | None = None) -> None:
    parser = model_parser(__doc__ or "", "of the heads, whose weights are saved")
    parser.set_defaults(shares="0.1,0.2,0.3,0.4")
    arguments = parser.parse_args(words)
    print("| | saved of query, key and value weights | loss increase |\n|---|---|---|", flush=True)
    for each in measured(arguments.model, shares_of(arguments), **sizes_of(arguments)):
        print(each, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
