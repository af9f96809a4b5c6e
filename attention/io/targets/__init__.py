"""Targets of an export, one file per target, discovered automatically.

A target file defines `TARGET`, a `Target`: what the engines that read the format will hold of a
plan, known from config and plan alone, and how the format is written and read back. A module whose
name starts with an underscore is a helper.

Legend: L layers, H query heads.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attention.base.messages import one_of
from attention.cache_formats import CachePair
from attention.geometry import HeadGeometry
from attention.plan import AttentionPlan, cached_numbers, number_bytes
from attention.tensor_parallel import RankCache, RankLayoutError, layers_per_rank


class TargetError(ValueError):
    """A plan or model that a target cannot hold.

    The message names the layer where one is to blame, and what to do.
    """


@dataclass(frozen=True)
class EngineSupport:
    """The cache that an engine stores per token.

    Key heads and value heads of each layer, all of `head_dim` numbers, and `others` further numbers
    in all layers together (the key-side weights of composition).

    Attributes:
        query_heads: Of each layer, zeros included; empty where there are no others than the
            model's.
        other_layers: As in `AttentionPlan`.
    """

    key_heads: tuple[int, ...]
    value_heads: tuple[int, ...]
    head_dim: int
    others: int = 0
    query_heads: tuple[int, ...] = ()
    other_layers: tuple[tuple[int, int], ...] = ()

    def zero_query_heads(self, plan: AttentionPlan) -> int:
        """Query heads of zeros, in all layers: they take work and no cache."""
        return sum(count - plan.num_heads for count in self.query_heads)

    def extra_attention(self, plan: AttentionPlan) -> float:
        """Work of these over that of the query heads of `plan`: 0.125 is an eighth more."""
        return self.zero_query_heads(plan) / (plan.num_heads * plan.num_layers)

    def bytes_per_token(self, dtype: Any) -> int:
        """Bytes of the cache a token. `dtype`: of the cache, a torch dtype or its name."""
        numbers = (sum(self.key_heads) + sum(self.value_heads)) * self.head_dim + self.others
        numbers += cached_numbers(self.other_layers)
        return numbers * number_bytes(dtype)

    def bytes_in(self, pair: CachePair) -> int:
        """Return the bytes of a token's cache with keys and values in the formats `pair`.

        Raises:
            CacheFormatError: For heads that are no whole number of blocks.
        """
        keys = sum(self.key_heads) * pair.keys.head_bytes(self.head_dim)
        values = sum(self.value_heads) * pair.values.head_bytes(self.head_dim)
        return keys + values + pair.bytes_of(self.other_layers)

    def on_rank(self, ranks: int, num_heads: int | None = None) -> EngineSupport:
        """Return what each of `ranks` GPUs keeps with tensor parallelism.

        Args:
            ranks: GPUs, N.
            num_heads: Query heads of a layer, where they are to be checked as well.

        Raises:
            RankLayoutError: For heads that cannot be divided among the GPUs.
        """
        queries = self.query_heads or (() if num_heads is None else (num_heads,))
        if wrong := [count for count in queries if count % ranks]:
            raise RankLayoutError(
                f"{wrong[0]} query heads cannot be divided among {ranks} GPUs; choose a number of "
                f"GPUs that divides {wrong[0]}"
            )
        return replace(
            self,
            key_heads=layers_per_rank(self.key_heads, ranks),
            value_heads=layers_per_rank(self.value_heads, ranks),
            other_layers=tuple(
                (layers_per_rank([heads], ranks)[0], head_dim)
                for heads, head_dim in self.other_layers
            ),
            query_heads=tuple(count // ranks for count in self.query_heads),
        )

    def rank_cache(
        self,
        ranks: int,
        dtype: Any,
        original: EngineSupport | None = None,
        num_heads: int | None = None,
    ) -> RankCache:
        """Return the bytes of a token on each of `ranks` GPUs.

        Args:
            ranks: GPUs, N.
            dtype: Of the cache.
            original: What an engine keeps of the model before its conversion; a layout that the
                GPUs cannot hold counts as unknown.
            num_heads: As in `on_rank`.

        Raises:
            RankLayoutError: As `on_rank`.
        """
        cache = self.on_rank(ranks, num_heads)
        before = None
        if original is not None:
            with contextlib.suppress(RankLayoutError):
                before = original.on_rank(ranks).bytes_per_token(dtype)
        sides = zip(self.key_heads, self.value_heads, strict=True)
        return RankCache(
            tensor_parallel=ranks,
            kv_bytes_per_token_per_gpu=cache.bytes_per_token(dtype),
            kv_bytes_per_token_per_gpu_original=before,
            kv_bytes_per_token=self.bytes_per_token(dtype),
            replicated_layers=sum(min(counts) < ranks for counts in sides),
        )

    @classmethod
    def of(
        cls,
        kv_heads: Sequence[int],
        head_dim: int,
        query_heads: Sequence[int] = (),
        other_layers: Sequence[tuple[int, int]] = (),
    ) -> EngineSupport:
        """Return an engine whose KV head is a key head and a value head."""
        heads = tuple(kv_heads)
        return cls(
            heads,
            heads,
            head_dim,
            query_heads=tuple(query_heads),
            other_layers=tuple(other_layers),
        )

    @classmethod
    def of_geometry(cls, geometry: HeadGeometry) -> EngineSupport:
        """Return an engine that stores the heads of a checkpoint before its conversion."""
        return cls.of(
            [geometry.num_kv_heads] * geometry.num_layers,
            geometry.head_dim,
            other_layers=geometry.other_layers,
        )


@dataclass(frozen=True)
class Lowered:
    """A model to be written and what the lowering did.

    Attributes:
        exact: The maths is the same up to rounding.
        folded: Weights were multiplied and not only copied, so that a 16-bit dtype rounds them once
            more.
    """

    model: PreTrainedModel
    notes: tuple[str, ...]
    exact: bool = True
    folded: bool = False


@dataclass(frozen=True)
class Target:
    """A format that checkpoints are exported to.

    `support_for(config, plan)`: the cache per token; raises TargetError for what the format cannot
    represent. It reads no weights, and a search may call it for every candidate. `lower(model)`:
    the model to be written, in float32. `write(model, folder, dtype, tokenizer)`: all files into a
    new folder (`tokenizer` as in `attention.io.checkpoint.save`); returns the format's name of the
    model. `read(folder, config)`: the written model, in float32, to be compared with the source;
    `config`: of the model that was written.

    Attributes:
        engines: Software that loads it.
        dtypes: Names of what weights can be written in.
        except_for: Those of `engines` that do not load it for this config and plan.
    """

    name: str
    engines: tuple[str, ...]
    support_for: Callable[[Any, AttentionPlan], EngineSupport]
    lower: Callable[[PreTrainedModel], Lowered]
    write: Callable[[PreTrainedModel, Path, str, Any], str]
    read: Callable[[Path, Any], PreTrainedModel]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    except_for: Callable[[Any, AttentionPlan], tuple[str, ...]] = lambda _config, _plan: ()

    def engines_of(self, config: Any, plan: AttentionPlan) -> tuple[str, ...]:
        """Return the software that loads an export of this plan."""
        without = self.except_for(config, plan)
        return tuple(name for name in self.engines if name not in without)


@cache
def targets() -> dict[str, Target]:
    """All targets by name."""
    by_name = {}
    for info in pkgutil.iter_modules(__path__):
        if not info.name.startswith("_"):
            target = importlib.import_module(f"{__name__}.{info.name}").TARGET
            by_name[target.name] = target
    return by_name


GGUF_READERS = (
    "ollama",
    "llama.cpp",
    "llamacpp",
    "llama-cpp",
    "lmstudio",
    "lm-studio",
    "koboldcpp",
    "jan",
)
STOCK_READERS = (
    "sglang",
    "tgi",
    "text-generation-inference",
    "mlx",
    "mlx-lm",
    "tensorrt-llm",
    "trt-llm",
    "lmdeploy",
)
_LIBRARY = ("hf", "huggingface", "hugging-face", "safetensors", "pytorch")


def target(name: str, more: Sequence[str] = ()) -> Target:
    """Return the target of that name.

    Args:
        name: Name of the target.
        more: Other names that the caller knows, for the message.

    Raises:
        ValueError: Naming the targets, for one that is unknown.
    """
    if name not in targets():
        raise ValueError(_unknown(name, sorted([*targets(), *more])))
    return targets()[name]


def _unknown(name: str, names: Sequence[str]) -> str:
    """Return the error message for a target that does not exist.

    If it is the name of software, the message names the target which that loads.
    """
    plain = str(name).lower().replace("_", "-").replace(" ", "-")
    listed = f"target must be one of {list(names)}, got {name!r}"
    if plain in GGUF_READERS:
        return f"{listed}: {name} loads GGUF files, which are target gguf"
    if plain in STOCK_READERS:
        return (
            f"{listed}: {name} loads stock folders, which are target gqa (as many KV heads in "
            f"every layer)"
        )
    if plain in _LIBRARY:
        return (
            f"{listed}: transformers loads target gqa (a stock folder) and target "
            f"transformers (with code, any plan)"
        )
    return one_of("target", names, name)


def best_target(
    config: Any, plan: AttentionPlan, dtype: torch.dtype | str
) -> tuple[str, dict[str, str]]:
    """Return the target with the smallest cache per token, and why not any other.

    Among equals it is the one that more engines read.

    Raises:
        TargetError: If no target can represent the plan.
    """
    cache_bytes = {}
    refusals = {}
    for name, one in targets().items():
        try:
            cache_bytes[name] = one.support_for(config, plan).bytes_per_token(dtype)
        except TargetError as error:
            refusals[name] = str(error)
    if not cache_bytes:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise TargetError(
            f"no target supports this plan ({reasons}); keep it in Headfold's own format"
        )
    engines_of = {name: targets()[name].engines_of(config, plan) for name in cache_bytes}
    best = min(cache_bytes, key=lambda name: (cache_bytes[name], -len(engines_of[name]), name))
    for name in cache_bytes.keys() - {best}:
        bytes_ = cache_bytes[name]
        engines = " and ".join(engines_of[name])
        more = f"{bytes_} KV bytes per token instead of {cache_bytes[best]}"
        refusals[name] = (
            more
            if bytes_ > cache_bytes[best]
            else f"the same {bytes_} KV bytes per token, read by {engines}"
        )
    return best, dict(sorted(refusals.items()))
