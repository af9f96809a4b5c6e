"""The decode kernel in Triton's interpreter, on the CPU. Started with TRITON_INTERPRET=1; prints one JSON object.

Largest differences from expand, then SDPA in float32, for maps, head dims, dtypes, lengths and masks.
"""

from __future__ import annotations

import json

import torch

from attention.modeling import kernels
from attention.modeling.kernels import Tables, difference
from attention.modeling.kernels.flash_decode import split_sizes
from attention.plan import LayerPlan
from attention.plan_parts import dense

PLANS = {
    "mha": LayerPlan.identity(4),
    "gqa": LayerPlan((0, 0, 1, 1), (0, 0, 1, 1)),
    "mqa": LayerPlan((0,) * 80, (0,) * 80),  # wider than a unit
    "uneven": LayerPlan((0, 1, 0, 2, 0, 0), (0, 1, 0, 2, 0, 0)),
    "decoupled": LayerPlan((0, 1, 0, 2, 2, 2, 0, 1), (0, 0, 1, 1, 0, 2, 0, 3)),
    "wide": LayerPlan((0,) * 6, (0,) * 6, 4, 4),
    "wide in groups": LayerPlan((0, 1, 0, 2, 0, 0), (0, 1, 0, 2, 0, 0), 2, 2),
    "wide values": LayerPlan((0, 1, 0, 2, 2, 2, 0, 1), (0, 0, 1, 1, 0, 2, 0, 3), 1, 3),
    "wide keys": LayerPlan((0, 1, 0, 2, 2, 2, 0, 1), (0, 0, 1, 1, 0, 2, 0, 3), 3, 1),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def masks(tokens: int) -> dict[str, torch.Tensor]:
    seen = torch.rand(2, 1, 1, tokens, generator=torch.Generator().manual_seed(3)) > 0.4
    seen[0, ..., :70] = False  # a whole block and more is padding
    seen[..., -1] = True
    return {"boolean": seen, "additive": torch.where(seen, 0.0, -1e30), "shared": seen[1:].clone()}


def wrong_map() -> float:
    """Error with one head that reads a wrong value head: the comparison must detect it."""
    plan, wrong = PLANS["decoupled"], LayerPlan(PLANS["decoupled"].key_map, dense((0, 0, 1, 1, 0, 2, 1, 3)))
    right, kernels.Tables.of = Tables.of(wrong), lambda plan: right  # type: ignore[method-assign]
    return difference(plan, 32, 130, "cpu", torch.float32)


def main() -> None:
    result = {f"plan {name}": difference(plan, 32, 130, "cpu", torch.float32) for name, plan in PLANS.items()}
    plan = PLANS["decoupled"]
    result |= {f"width {d}": difference(plan, d, 70, "cpu", torch.float32) for d in (32, 64, 80, 128, 256)}
    result |= {f"dtype {name}": difference(plan, 32, 130, "cpu", dtype) for name, dtype in DTYPES.items()}
    result |= {f"tokens {s}": difference(plan, 32, s, "cpu", torch.float32) for s in (1, 64, 65, 700)}
    result |= {f"mask {name}": difference(plan, 32, 200, "cpu", torch.float32, m) for name, m in masks(200).items()}
    result["splits"] = split_sizes(700, 2 * 3, 4, 32)[0]
    result["wrong map"] = wrong_map()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
