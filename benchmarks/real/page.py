"""docs/real.md from the records of `make real`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from attention.base.timing import duration
from benchmarks.records import PartRecord, Records, ended, sections

PAGE = Path(__file__).resolve().parents[2] / "docs" / "real.md"
RECORDS = Path(__file__).resolve().parent / "records.json"
GPU_RECORDS = Path(__file__).resolve().parent / "records-gpu.json"
"""Of the same commands on a machine with a GPU."""
TITLES = {
    "fetch": "The model",
    "defaults": "A size and nothing else",
    "inspect": "`headfold inspect`",
    "gqa": "Means of neighbours (`gqa`)",
    "gqa_refined": "The same with the local fit (`gqa_refined`)",
    "align_plain": "Means of aligned heads (`align_plain`)",
    "least_squares": "Least squares (`least_squares`)",
    "headfold_gqa": "Groups of heads (`headfold_gqa`)",
    "headfold_layers": "Head counts by layer (`headfold_layers`)",
    "headfold_wide": "Wide heads (`headfold_wide`)",
    "headfold": "Keys and values apart (`headfold`)",
    "formats": "Cache formats, alone and with fewer heads",
    "llama.cpp": "In llama.cpp",
    "vLLM": "In vLLM",
    "engine_caches": "Cache formats in llama.cpp itself",
    "long_context": "Recall in long contexts",
    "tasks": "Tasks of lm-evaluation-harness",
    "generations": "Ten questions",
    "other_text": "Another text",
    "code": "Code",
    "calibration": "Calibration text of the same kind and of another",
    "other_formats": "Cache formats on the other text",
    "finetune": "Half of the heads, and forty steps",
    "learning_rates": "Learning rates of the search",
    "search": "A search with a short distillation",
    "promotion": "A promotion",
}
"""Titles of the parts of `benchmarks.real.parts`, in the order in which they run."""
CORE = (
    "fetch",
    "inspect",
    "gqa",
    "gqa_refined",
    "align_plain",
    "least_squares",
    "headfold_layers",
    "headfold_wide",
    "formats",
    "llama.cpp",
    "generations",
    "code",
    "search",
)
"""Default parts: from the model to a search, without the long comparisons."""
_SEARCH_TEXT = (
    "Trials are measured on 4,096 tokens in sequences of 256, on which the best model is chosen; the gate's numbers, "
    "of the promoted models and their baselines, are of other held-out text."
)
_LARGEST = "The conversions are those to 67% of the KV heads."
ABOUT = {
    "fetch": "Downloaded from a package index.",
    "defaults": "`headfold convert --model FILE --kv-ratio 0.5 --out half`, then `headfold export half --target gguf "
    "--check --out half-gguf`: 16,384 tokens of the built-in text in sequences of 2,048. "
    "Measured before `auto` compared wide heads: at 67% it may now choose `headfold_wide`.",
    "inspect": "What each layer loses with fewer KV heads, as a page with figures.",
    "gqa": "The recipe of Ainslie 2023 (GQA).",
    "gqa_refined": "`--recipe gqa --set refinement=fit_heal`: means, then the local fit that Headfold's recipes have.",
    "align_plain": "`--recipe align --set relaxation=none`: heads of a group are rotated towards each other (Jin 2024) "
    "and averaged. The paper then trains under masks, as the search below does.",
    "formats": "The cache rounded as the engines round it (`headfold evaluate --cache-types`); bytes relative to the "
    "original's cache in 16 bits. *fp8* is vLLM's, the others are llama.cpp's; with two "
    "names the first is the keys' format and the second the values'.",
    "llama.cpp": "`headfold export --target gguf --check`, and the speed of one sequence compared with the original. "
    f"{_LARGEST}",
    "vLLM": f"The same by target `vllm`, on a CPU: compared in float32, timed in bfloat16. {_LARGEST}",
    "engine_caches": "`headfold evaluate --engine llama.cpp --cache-types`: losses from the engine's own "
    "log-probabilities on 2,048 tokens, bytes from its log; increase and share relative to the original in f16.",
    "long_context": "`headfold evaluate --context-lengths`: a line with a value is hidden at five depths of held-out "
    "text; *recall* is how often the hidden one of four values is the likeliest, in 40 contexts of each length. "
    "Chance is 25%, and a standard error is up to 8 points. "
    f"{_LARGEST}",
    "tasks": "`headfold evaluate --tasks ruler_niah_single_1,ruler_vt --context-lengths 1024`: tasks of RULER, whose "
    f"data is generated; those of the harness itself need a model hub. {_LARGEST}",
    "generations": f"Greedy, through the chat template; the answers of the original and of each conversion. {_LARGEST}",
    "other_text": f"A text of which neither calibration nor the local fit has seen anything. {_LARGEST}",
    "code": f"`headfold evaluate --eval-data stdlib`: held-out files of Python's standard library alone. {_LARGEST}",
    "calibration": "`headfold_wide` at two thirds by what it was calibrated on, measured on the built-in text and on "
    "the first text named below, the *other text* of the columns. In the rows *other text* is the second, of its kind.",
    "other_formats": "Conversions that are calibrated on 32,768 tokens of that kind, and the original.",
    "finetune": "Calibrated on 32,768 tokens of the other text's kind, then `headfold finetune --original`: KL to the "
    "original on fresh tokens of it, all weights at 1e-4.",
    "learning_rates": "The 24 steps of a trial of the search below, at each of three rates: from it the search takes "
    "the rate of averaged heads (`gqa`), of least squares, and of heads that are fitted (`headfold_gqa`).",
    "search": "`headfold search configs/smollm2.yaml model.path=SmolLM2-135M-Instruct.Q4_1.gguf` (and "
    f"`train.dtype=bf16` on CPUs that multiply it): trials by Ray Tune, each trained by Ray Train and DeepSpeed "
    f"towards the original's predictions. {_SEARCH_TEXT} Each arm has the rate that is best "
    "for its kind of conversion above, of which that of `gqa` is unstable at a third of the heads "
    "([log](../benchmarks/LOG.md)). *copy*: the same model as that of an earlier trial, whose result it takes.",
    "promotion": "The same with two recipes at one size: the better one is promoted, which trains it and the baseline "
    "further, compares both on other text, registers the model, and exports it.",
}
HEAD = """# A public model: SmolLM2-135M-Instruct

<!-- written by `make real` (benchmarks/real/page.py); do not edit -->

[SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) is small, but real: 30 layers, 9
query heads on 3 KV heads of 64, a vocabulary of 49,152 tokens, a context of 8,192, a chat template. It is a 4-bit
GGUF file in a Python package (Apache-2.0); all numbers here include the rounding of that file, since they compare the
model with itself. Only the finetuned, searched and promoted models are trained.

Unless a table says otherwise the text is the built-in mix of prose and code: 8,192 tokens to calibrate on and as many
held-out ones to measure on, in sequences of 512. More calibration text loses less; [calibrate on your own
text](howto/own-data.md) for numbers on your use. *Increase* is that of the held-out loss in nats per token, with
the standard error of the paired difference. *Minutes* is the time of one command for all its sizes, and the time below
a table that of the commands that the part was the first to run, both on cores that may have done other work too; an
idle machine is faster. Cores with AVX2 take two to three times as long as those with AVX512. *Former splitting*:
measured when Headfold split white space before digits otherwise than the model's tokenizer, which gave other tokens for
1.3 % of the built-in text and for none of WikiText-2 ([log](../benchmarks/LOG.md)). *With changes* after a commit: the
checkout had uncommitted changes.

"""
HOW = """
## How to measure it

```bash
make real                        # the core; the same command continues after a kill
make real ARGS="--only formats"  # one part, with what it needs
make real ARGS=--all             # all parts
make real ARGS=--all TEXT=wiki.test.txt CALIBRATION_TEXT=wiki.valid.txt  # with your own texts
python examples/real/smollm2.py  # only the model at some sizes
```

{core}

Each part runs the commands of `headfold` that a user would type, prints them, and is recorded when it has finished; the
JSON of every command and the converted models are in `runs/real` (6 GB, 25 GB during the search). `make real
ARGS="--again formats"` measures a part again.
"""


def page(records: Records, on_gpu: Records | None = None) -> str:
    """Return the whole page.

    Args:
        records: Of a machine without a GPU.
        on_gpu: Of one with a GPU.
    """
    text = HEAD + sections(records, TITLES, ABOUT, _part)
    return text + (_on_a_gpu(records, on_gpu) if on_gpu is not None else "") + _how(records)


def _on_a_gpu(records: Records, on_gpu: Records) -> str:
    """Return the section on the commands that were measured on a GPU too, next to their results without one."""
    facts = "; ".join(f"{name} {value}" for name, value in on_gpu.card.items() if name != "device")
    device, cpus = on_gpu.card["device"], records.card["device"]
    rows: list[dict[str, str]] = []
    apart: list[str] = []
    for name, part in on_gpu.parts.items():
        other = records.parts.get(name)
        if part["status"] != "done" or name == "fetch":
            continue
        if other is None or not all("requested" in row for row in part["rows"]):
            apart.append(f"\n### {TITLES[name]} on a GPU\n\n{_part(part)}\n")
            continue
        for number, row in enumerate(part["rows"]):
            same = next((each for each in other["rows"] if each["requested"] == row["requested"]), {})
            first = number == 0
            rows.append(
                {
                    "command": TITLES[name] if first else "",
                    "KV cache": row["KV cache"],
                    "increase, GPU": row["increase"],
                    "increase, CPUs": same.get("increase", ""),
                    "time, GPU": duration(part["seconds"]) if first else "",
                    "time, CPUs": duration(other["seconds"]) if first else "",
                }
            )
    about = (
        f"The same commands on **{device}** ({facts}), and on the {cpus} above. The built-in text is Python's, "
        "and differs between its versions; times are of all sizes of a command, the start of its process included."
    )
    table = f"{_table(rows)}\n" if rows else ""
    return f"\n## On a GPU\n\n{textwrap.fill(about, 120)}\n\n{table}{''.join(apart)}"


def _how(records: Records) -> str:
    """Return the section on how to repeat the measurements, with the sums of the recorded times."""
    seconds = {name: part["seconds"] for name, part in records.parts.items()}
    core, whole = (duration(sum(seconds.get(name, 0) for name in names)) for names in (CORE, TITLES))
    names = ", ".join(f"`{name}`" for name in CORE)
    text = f"The core is {names}: {core} by the times above; all parts at least {whole}."
    return HOW.format(core=textwrap.fill(text, 120))


def _part(part: PartRecord) -> str:
    time = f", {duration(part['seconds'])}" if part["seconds"] >= 1 else ""
    notes = "".join(f"; {note}" for note in part.get("notes", []))
    when = ended(part, f"{part['date']}, commit {part['commit']}{time}{notes}.")
    return f"{_table(part['rows'])}\n\n{when}" if part["rows"] else when


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(str(row.get(column, '')) for column in columns)} |" for row in rows]
    return "\n".join(lines)
