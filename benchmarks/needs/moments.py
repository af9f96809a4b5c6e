"""Loss of smaller statistics: that of the demo checkpoint converted from mixed moments in each storage format.

    python -m benchmarks moments [--quick]

`attention.calibration.sizes.MIXED` names the ways. Recipe headfold, at a half and a quarter of the KV cache; the loss
increase right after fusion, and after the refinement layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer

from attention.calibration.calibrate import calibrate
from attention.calibration.sizes import MIXED, layer_bytes, matrices, mixed_dtype
from attention.families import geometry_of
from benchmarks.needs.memory import DEMO
from benchmarks.report import Row, Scale, benchmark
from orchestrator.conversion.execution import planning_context, refine_with
from search_spaces.planning.context import convert_with
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import recipe
from trainers.evaluation import evaluate
from trainers.text.data import load_sequences


@benchmark("moments", devices=("cpu",))
def moments(scale: Scale) -> Iterator[Row]:
    """Loss increase of the demo checkpoint by recipe headfold, from mixed moments in bfloat16 or shared by heads."""
    model = AutoModelForCausalLM.from_pretrained(DEMO).float().eval().requires_grad_(False)
    tokenizer, geometry = AutoTokenizer.from_pretrained(DEMO), geometry_of(model.config)
    count = scale.pick(512, 16_384)
    sequences, held_out = (
        load_sequences("stdlib", tokenizer, split=split, tokens=count, sequence_length=256)
        for split in ("calibration", "eval")
    )
    chosen = recipe(scale.pick("least_squares", "headfold"))  # whose increases take most of the time to measure
    loss, exact = evaluate(model, held_out).loss, dict[str, float]()
    for mixed in MIXED:
        if mixed == "kv_group" and matrices(geometry, mixed) == geometry.num_heads:
            continue  # the same as float32
        calibration = calibrate(model, sequences, mixed=mixed)
        context = planning_context(model, calibration, sequences, None)
        size = geometry.num_layers * layer_bytes(geometry, count, mixed) / 2**20
        note = f"{size:.0f} MiB of statistics; {mixed_dtype(mixed)}".replace("torch.", "")
        for ratio in scale.pick((0.5,), (0.5, 0.25)):
            plan = make_plan(chosen, ratio, context, np.random.default_rng(0))
            converted = convert_with(chosen, model, plan, calibration)
            for stage in ("fused", "refined"):
                if stage == "refined":
                    refine_with(chosen, model, converted, sequences)
                increase = evaluate(converted, held_out).loss - loss
                name = f"{ratio:.0%} of the cache, {stage}"
                yield Row(f"{name}, {mixed}", increase, exact.setdefault(name, increase), "nats per token", note)
