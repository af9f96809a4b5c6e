"""docs/gpu.md from the records; without any it says that nothing has been measured on a GPU, and how to do it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.records import PartRecord, Records, ended, sections

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
MEASURED = Path(__file__).resolve().parent / "records.json"
"""Records of a CUDA device, from which the page is written."""
TITLES = {
    "kernel": "The decode kernel against its reference",
    "decode": "Decoding in one layer",
    "decode-models": "Decoding with whole small models",
    "convert-llama-3-8b": "Conversion of two layers of Llama-3-8B",
    "convert-qwen3-8b": "Conversion of two layers of Qwen3-8B",
    "convert-gpt-oss-20b": "Conversion of two layers of gpt-oss-20b",
    "step": "A training step by its parts",
    "offload": "ZeRO 3, the optimiser in host memory",
    "offload-torch": "The same with torch's Adam, which compiles nothing",
    "doctor": "`headfold doctor`",
    "search": "A search on one GPU",
    "vllm": "Decoding in vLLM",
}
"""Titles of the parts of `benchmarks.gpu.parts`, in the order of running; the page does not need their code."""
ABOUT = {
    "kernel": "Largest difference of the fused kernel from expanded attention in float32, over lengths up to 32,768.",
    "decode": "A new token over a cache of a quarter of the heads, keys and values apart, against three rivals. "
    "torch's attention without cuDNN, which recompiles for every length of the cache.",
    "decode-models": "The same for whole small models, batches of 1 and 4.",
    "convert-llama-3-8b": "Layer by layer with the shipped recipe and all its steps, to half of the model's own cache.",
    "step": "Width of Llama-3-8B with its vocabulary, 4 layers, 4,096 tokens, bfloat16, KL from the original.",
    "offload": "Width of Llama-3-8B, 8 layers, 2,048 tokens, all weights trained, activations recomputed.",
    "doctor": "Each check with its seconds and its result.",
    "search": "The demo's checkpoint, two recipes at half of the heads, two trials at a time, bfloat16.",
    "vllm": "Width of Llama-3-8B, 8 layers, one sequence; without graphs.",
}
HEAD = """# On a GPU

<!-- written by `make gpu` (benchmarks/gpu/page.py); do not edit -->

"""
HOW = """
## How to measure it

On a machine with one CUDA GPU (an H100 or A100 with 80 GB has room for every part), in a checkout:

```bash
make setup
make gpu                # twelve parts; one that takes more than ten minutes is stopped and counts as failed
make gpu MINUTES=10     # or in pieces: stops after ten minutes, and continues when called again
```

Each part runs in a separate process and is recorded in the records file of `benchmarks/gpu/` when it has finished; the
same command continues with missing and failed parts, and writes this page. `make gpu ARGS="--again step"`
runs a part again. The last part needs vLLM, in its own environment (`make engines VLLM_PACKAGE=vllm`, then
`HEADFOLD_VLLM_PYTHON=engines/vllm/bin/python make gpu`); without it the part is skipped. The records of another card
need another file: `make gpu RECORDS=FILE`. `make gpu DEVICE=cpu` runs all parts in their smallest sizes, as a test.

To check a cluster, use [`headfold doctor`](cluster.md#check-the-cluster), which takes minutes.
"""
NOTHING = """**Nothing has been measured on a GPU yet.** No number in this documentation comes from one: the decode
kernel was run in Triton's interpreter and compiled for A100 and H100, device placement is tested on an emulated device,
and training with DeepSpeed on CPUs. Statements on speed and memory on GPUs are calculated.

What `make gpu` will measure:

"""


def titles() -> dict[str, str]:
    """The title of each part, in their order."""
    return TITLES


def page(records: Records | None) -> str:
    """The whole page."""
    if records is None or not records.parts:
        listed = "\n".join(
            f"- {title[0].lower() + title[1:] if not title.startswith('ZeRO') else title}" for title in TITLES.values()
        )
        return f"{HEAD}{NOTHING}{listed}\n{HOW}"
    return HEAD + sections(records, TITLES, ABOUT, _part) + HOW


def _part(part: PartRecord) -> str:
    when = ended(part, f"{part['date']}, commit {part['commit']}, {part['seconds']:.0f} s.")
    if not part["rows"]:
        return when
    lines = ["| | | | |", "|---|---:|---|---|"]
    for row in part["rows"]:
        cells = (row["name"], f"{row['value']:.4g}", row["unit"], row["note"])
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return f"{when}\n\n" + "\n".join(lines)
