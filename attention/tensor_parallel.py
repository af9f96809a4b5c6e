"""The KV cache on one GPU of an engine that runs with tensor parallelism.

Legend: N GPUs, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attention.ratios import percent


class RankLayoutError(ValueError):
    """Heads that cannot be divided among GPUs. The message names counts that can."""


def fits_ranks(kv_heads: int, ranks: int) -> bool:
    """Return whether `ranks` GPUs can hold `kv_heads` KV heads of a layer."""
    return kv_heads % ranks == 0 or ranks % kv_heads == 0


def heads_per_rank(kv_heads: int, ranks: int) -> int:
    """Return how many KV heads of a layer each GPU holds: max(1, kv_heads / N).

    This is the rule of vLLM (read in 0.32). `ModelConfig.get_num_kv_heads` in vllm/config/model.py
    returns `max(1, total_num_kv_heads // tensor_parallel_size)`, which is what the cache is sized
    by: with fewer KV heads than GPUs each GPU holds a copy of one. `QKVParallelLinear` in
    vllm/model_executor/layers/linear.py divides the larger number by the smaller one and fails on a
    remainder.

    Args:
        kv_heads: KV heads of the layer.
        ranks: GPUs, N.

    Raises:
        RankLayoutError: If neither number divides the other.
    """
    if not fits_ranks(kv_heads, ranks):
        fitting = [count for count in range(1, kv_heads + ranks) if fits_ranks(count, ranks)]
        below = max(count for count in fitting if count < kv_heads)
        above = min(count for count in fitting if count > kv_heads)
        raise RankLayoutError(
            f"{kv_heads} KV heads cannot be divided among {ranks} GPUs: one number must divide the "
            f"other; {below} or {above} KV heads can"
        )
    return max(1, kv_heads // ranks)


def layers_per_rank(kv_heads: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return `heads_per_rank` of each layer.

    Raises:
        RankLayoutError: Naming the first layer whose heads cannot be divided.
    """
    heads = []
    for layer, count in enumerate(kv_heads):
        try:
            heads.append(heads_per_rank(count, ranks))
        except RankLayoutError as error:
            raise RankLayoutError(f"layer {layer}: {error}") from None
    return tuple(heads)


@dataclass(frozen=True)
class RankCache:
    """The bytes that each GPU stores per token.

    Attributes:
        tensor_parallel: GPUs.
        kv_bytes_per_token_per_gpu: Of the model.
        kv_bytes_per_token_per_gpu_original: Of the model that it was converted from, if known.
        kv_bytes_per_token: Of the whole model, each head once.
        replicated_layers: Layers of which GPUs hold copies.
        at_least: Whether the heads of each layer are not known yet, and the first number is a
            lower bound.
    """

    tensor_parallel: int
    kv_bytes_per_token_per_gpu: int
    kv_bytes_per_token_per_gpu_original: int | None
    kv_bytes_per_token: int
    replicated_layers: int = 0
    at_least: bool = False

    @property
    def note(self) -> str:
        """Describe the result in one sentence."""
        ranks, rank_bytes = self.tensor_parallel, self.kv_bytes_per_token_per_gpu
        original = self.kv_bytes_per_token_per_gpu_original
        least = "at least " * self.at_least
        text = f"on each of {ranks} GPUs {least}{rank_bytes:,} KV bytes per token"
        if original is not None and rank_bytes >= original:
            before = "as before" if rank_bytes == original else f"{original:,} before"
            return (
                f"{text}, {before}: this saves nothing there, since every GPU holds at least one "
                "KV head per layer"
            )
        if original is not None:
            text += f", {percent(round(rank_bytes / original, 4))} of the original's {original:,}"
        if self.replicated_layers:
            text += (
                f"; in {self.replicated_layers} layer(s) GPUs hold copies of a KV head, so that "
                f"all of them together hold {ranks * rank_bytes:,} and not "
                f"{self.kv_bytes_per_token:,}"
            )
        return text

    def record(self) -> dict[str, Any]:
        """Return the fields for JSON, the note with them."""
        return {**asdict(self), "note": self.note}
