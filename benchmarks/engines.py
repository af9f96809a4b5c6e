"""What engines store for each plan: `python -m benchmarks.engines docs/serving.md` (or no file: to the terminal).

The demo checkpoint is converted, exported for each engine and checked there (`headfold export --check`); the table goes
between the marks in the file. Without vLLM (`make engines`) it ends with what is missing. `--only WORD` instead of the
file prints the rows of the plans whose name has the word.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attention.calibration.calibrate import calibrate
from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.io.files import write_whole
from attention.plan import AttentionPlan, LayerPlan
from orchestrator import checkpoints
from orchestrator.config.options import ExportOptions
from orchestrator.serving.engines import ENGINES
from orchestrator.serving.export import export_checkpoint
from trainers.text.data import Texts

DEMO = Path(__file__).resolve().parents[1] / "examples" / "stdlib-llama"
BEGIN, END = "<!-- engines: made by `make engines` -->", "<!-- engines: end -->"
TARGETS = {"transformers": "transformers", "vLLM": "vllm", "llama.cpp": "gguf"}
HEAD = (
    "| plan (KV heads of the four layers) | engine | target, written as | KV heads | bytes per token: promised | "
    "reported | tokens in 1 GiB | same tokens | log-probabilities differ by |\n|---|---|---|---|---|---|---|---|---|\n"
)


def plans() -> dict[str, AttentionPlan | None]:
    """Kinds of plans for the demo's eight heads, by what the page calls them; None is the original model."""
    two, one, four = (0, 0, 0, 0, 1, 1, 1, 1), (0,) * 8, (0, 0, 1, 1, 2, 2, 3, 3)
    uneven, other = (0, 0, 0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 0, 0, 1, 1)
    return {
        "original (8)": None,
        "uniform (2)": _plan([two] * 4, [two] * 4),
        "a count per layer (4, 2, 1, 1)": _plan([four, two, one, one], [four, two, one, one]),
        "unequal groups (2)": _plan([uneven] * 4, [uneven] * 4),
        "keys and values apart (2 keys, 2 values)": _plan([two] * 4, [other] * 4),
        "wide (1 head of 64, `headfold_wide`)": AttentionPlan((LayerPlan(one, one, 2, 2),) * 4, 32),
    }


def _plan(keys: list[tuple[int, ...]], values: list[tuple[int, ...]]) -> AttentionPlan:
    return AttentionPlan(tuple(LayerPlan(key, value) for key, value in zip(keys, values, strict=True)), 32)


def row(kind: str, engine: str, record: Mapping[str, Any]) -> str:
    check = record["check"]
    run = check["runs"][0]
    cells = (
        kind, check["version"], f"`{TARGETS[engine]}`, {record['model_type']}", ", ".join(map(str, record["kv_heads"])),
        str(check["kv_bytes_per_token_promised"]), f"{check['kv_bytes_per_token']:g}", f"{check['capacity']:,}",
        f"{run['same']} of {run['prompts']}", f"{run['difference']:.1g}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def _converted(demo: PreTrainedModel, plan: AttentionPlan) -> PreTrainedModel:
    """Wide heads are fitted to keys and values of a text, others averaged."""
    if not plan.is_wide:
        return convert(demo, plan)
    tokenizer = checkpoints.open_checkpoint(DEMO).tokenizer
    text = Texts("stdlib").load(tokenizer, 512, eval_tokens=256, sequence_length=256, calibration_tokens=2048)
    return convert(demo, plan, fusion="least_squares", calibration=calibrate(demo, text.calibration))


def measure(folder: Path, only: str = "") -> str:
    """The table, of the plans whose name has the word `only`."""
    for engine in ENGINES.values():
        engine.find(None)  # before any work
    demo, text = checkpoint.load(DEMO, torch.float32), HEAD
    chosen = [(kind, plan) for kind, plan in plans().items() if only in kind]
    for index, (kind, plan) in enumerate(chosen):
        source = checkpoint.save(demo if plan is None else _converted(demo, plan), folder / f"source-{index}", DEMO)
        for engine, target in TARGETS.items():
            out = folder / f"{target}-{index}"
            record = export_checkpoint(
                ExportOptions(
                    checkpoint=source, target=target, out=out, dtype="float32", check=True, allow_larger_cache=True
                )
            )
            text += row(kind, engine, record)
            print(f"{kind}: {engine} done", file=sys.stderr, flush=True)
    return text


def main(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = measure(Path(folder), words[1] if words[:1] == ["--only"] else "")
    if words[:1] in ([], ["--only"]):
        print(table)
        return
    page = Path(words[0])
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    write_whole(page, f"{before}{BEGIN}\n\n{table}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
