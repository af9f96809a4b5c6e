"""Loss against KV bytes of several recipes, from Python: `headfold convert --kv-ratio 0.5,0.25`, side by side.

    python examples/curve.py examples/stdlib-llama
    python examples/curve.py /models/my-llama --recipes gqa,headfold_layers --text texts.jsonl

Nothing is saved; `ConvertOptions` takes a folder `out` for that.
"""

from __future__ import annotations

import argparse

from orchestrator.config.options import ConvertOptions
from orchestrator.tasks.convert import Convert


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss against KV bytes of several recipes.")
    parser.add_argument("model", help="folder or hub name of a checkpoint")
    parser.add_argument("--recipes", default="gqa,headfold_gqa")
    parser.add_argument("--kv-ratios", default="0.5,0.25")
    parser.add_argument("--text", default="stdlib", help="to calibrate and to measure on")
    parser.add_argument("--tokens", type=int, default=16_384)
    arguments = parser.parse_args()
    ratios = [float(ratio) for ratio in arguments.kv_ratios.split(",")]
    print(f"{'recipe':<16} {'bytes per token':>15} {'loss increase':>13}")
    for recipe in arguments.recipes.split(","):
        options = ConvertOptions(
            model=arguments.model,
            recipe=recipe,
            kv_ratio=ratios,
            calibration_data=arguments.text,  # a part of it is held out and measured on
            calibration_tokens=arguments.tokens,
            eval_tokens=arguments.tokens,
            sequence_length=256,
        )
        record = Convert(options).run()
        for point in record.get("points", [record]):
            print(f"{recipe:<16} {point['kv_bytes_per_token']:>15,} {point['loss_increase']:>+13.4f}")


if __name__ == "__main__":
    main()
