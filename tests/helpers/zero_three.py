"""DeepSpeed's ZeRO 3 keeps small weights whole, and a tiny model has no others: here none is, so that all are split."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest


def split_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine that is made from now on holds its part of each weight alone, and no whole one between its uses."""
    initialize = deepspeed.initialize

    def split(*args: Any, config: dict[str, Any], **more: Any) -> Any:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        return initialize(*args, config=config, **more)

    monkeypatch.setattr(deepspeed, "initialize", split)
