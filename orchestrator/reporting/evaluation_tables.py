"""The output of `headfold convert` and `headfold evaluate`, from their records."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from attention.io.stock_form import export_command
from attention.ratios import percent
from orchestrator.reporting.console import console
from orchestrator.reporting.tables import Table
from orchestrator.storage.records import unmet

_STDERR = "_stderr"


def tasks_table(tasks: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    """Return a row for each metric of each task, a column for each model: value ± standard error.

    Args:
        tasks: Scores by model, task and metric.
    """
    models = list(tasks)
    rows = []
    for name, scores in tasks[models[0]].items():
        for metric in scores:
            if metric != "items" and _STDERR not in metric:
                cells = [_score(tasks[model].get(name, {}), metric) for model in models]
                rows.append([name, metric, f"{scores.get('items', '')}", *cells])
    return Table(("task", "metric", "items", *models), rows)


def _score(scores: Mapping[str, float], metric: str) -> str:
    if metric not in scores:
        return ""
    name, dot, filter_name = metric.partition(".")
    return _with_error(f"{scores[metric]:.3f}", scores.get(f"{name}{_STDERR}{dot}{filter_name}"))


def _with_error(value: str, error: float | None) -> str:
    return value if error is None else f"{value} ± {error:.3f}"


def position_table(losses: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    """Return the loss in nats of each range of positions, a column for each model."""
    models = list(losses)
    rows = [
        [
            f"{part['from']} to {part['to'] - 1}",
            *(f"{losses[model][index]['loss']:.3f}" for model in models),
        ]
        for index, part in enumerate(losses[models[0]])
    ]
    return Table(("positions", *models), rows)


def recall_table(recall: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> Table:
    """Return recall and margin of each context length and depth, a column for each model."""
    models = list(recall)
    rows = []
    for length, depths in recall[models[0]].items():
        for index, depth in enumerate(depths):
            entries = [recall[model][length][index] for model in models]
            cells = [
                f"{e['recall']:.2f}, {e['margin']:+.2f} ± {e['margin_stderr']:.2f}" for e in entries
            ]
            rows.append([length, f"{depth['depth']:.0%}", *cells])
    return Table(("context", "depth", *models), rows)


def increase_of(record: Mapping[str, Any]) -> str:
    """Return the increase of the loss, with its standard error over several sequences."""
    return _with_error(f"{record['loss_increase']:+z.3f}", record.get("loss_increase_stderr"))


def polish_of(work: Mapping[str, Any]) -> str:
    """Return a description of the training at the end of a conversion."""
    weights = {"all": "all weights", "kv": "keys and values"}[work["weights"]]
    return (
        f"{work['steps']} steps of {weights}, {work['tokens']:,} tokens, {work['flops']:.2g} "
        f"operations; KL on the training text {work['first_loss']:.3f} before, "
        f"{work['last_loss']:.3f} after"
    )


def eval_text_of(record: Mapping[str, Any]) -> str:
    """Return the description of the text that a loss was measured on."""
    left_out = record.get("eval_documents_left_out")
    note = f" ({left_out} documents of the calibration text left out)" if left_out else ""
    return f"{record['eval_tokens']:,} tokens of {record['eval_data']}{note}"


def perplexity_of(record: Mapping[str, Any]) -> str:
    """Return the perplexity before and after a conversion, and its relative increase."""
    before, after = record["original_perplexity"], record["perplexity"]
    error = record.get("loss_increase_stderr")
    spread = "" if error is None else f" ± {100 * after / before * error:.1f}"
    relative = f"{100 * (after / before - 1):+,.1f}{spread} %"
    return f"{before:.2f} before, {after:.2f} after ({relative})"


def tokens_per_gb(kv_bytes_per_token: float) -> int:
    """Return the number of tokens per GB (1e9 bytes) of KV cache."""
    return int(1e9 // kv_bytes_per_token)


def next_command(record: Mapping[str, Any], engine: str | None = None) -> str | None:
    """Return the command that serves a saved conversion, or exports it for an engine.

    Args:
        record: Of a conversion at one KV ratio.
        engine: Engine that it was made for, as `vllm` or `llama.cpp`; None for any.

    Returns:
        None for a model that was not saved, or that no engine loads.
    """
    folder = record.get("out")
    if folder is None:
        return None
    stock = record["format"] == "stock"
    if stock and "vLLM" in record["loads_in"] and engine in (None, "vllm"):
        return f"vllm serve {shlex.quote(str(folder))}"
    targets = {"llama.cpp": "gguf", "vllm": "vllm", "transformers": "transformers"}
    if engine == "llama.cpp" or (engine in targets and not stock):
        return export_command(folder, targets[engine])
    if engine == "transformers":
        return None
    commands = re.findall("`(headfold export [^`]*)`", record["format_note"])
    return commands[0] if commands else None


def print_conversion(record: Mapping[str, Any], out: Any) -> None:
    """Print the measurements, their text, the software that loads the result, and its path.

    Args:
        record: Of `headfold convert`, at one or several KV ratios.
        out: Where the result was saved; None if it was not.
    """
    for changes in record.get("points", [{}]):
        point = {**record, **changes}
        cache_bytes, before = point["kv_bytes_per_token"], point["kv_bytes_per_token_original"]
        facts = {
            "recipe": f"{point['recipe']['name']} at {percent(point['kv_ratio'])} of the KV cache"
            + unmet(point),
            "text": eval_text_of(point),
            "perplexity": perplexity_of(point),
            "loss": f"{point['original_loss']:.3f} before, {point['loss']:.3f} after "
            f"({increase_of(point)} nats per token), KL {point['kl']:.3f}",
            "KV cache": f"{cache_bytes:,} bytes per token, {before:,} before; "
            f"{tokens_per_gb(cache_bytes):,} tokens per GB, {tokens_per_gb(before):,} before",
        }
        if cache := point.get("engine_cache"):
            words = cache_words(cache, "original")
            facts["in engine"] = f"{words}; loss increase {increase_of(cache)}"
        if "polish" in point:
            facts["polish"] = polish_of(point["polish"])
        if out is not None:
            facts["format"] = point["format_note"]
        for name, text in facts.items():
            print(f"{name:11}{text}")
        for note in point.get("notes", ()):
            print(f"note       {note}")
    if out is not None:
        if "points" in record:
            print(f"checkpoints, curve.json and curve.png: {out}")
        else:
            print(f"checkpoint {record['out']}")


def print_evaluation(record: Mapping[str, Any]) -> None:
    """Print loss, cache and speed, from a record of `headfold evaluate`."""
    print(
        f"held-out loss {record['loss']:.3f} nats per token, perplexity "
        f"{record['perplexity']:.2f}, on {eval_text_of(record)}"
    )
    for note in record.get("notes", ()):
        print(f"note: {note}")
    if record["original"] is not None:
        print(
            f"original model {record['original_loss']:.3f}, perplexity "
            f"{record['original_perplexity']:.2f}; loss increase {increase_of(record)} nats per "
            f"token, KL {record['kl']:.3f}"
        )
    if record["baseline"] is not None:
        print(f"baseline {record['baseline_loss']:.3f}")
    print(
        f"KV cache: {percent(record['kv_ratio'])} of {record['kv_ratio_of']}; "
        f"{record['kv_bytes_per_token']} bytes per token planned, "
        f"{record['cache_bytes_measured']} allocated after {record['cache_tokens']} tokens"
    )
    if cache := record.get("engine_cache"):
        print(f"measured with {cache_words(cache, 'original' if record['original'] else 'model')}")
    if rows := record.get("rounded_caches"):
        reference = "original" if record["original"] else "model"
        print(f"cache formats, relative to the {reference} in 16 bits:")
        console().print(rounded_caches_table(rows).for_terminal())
    if "decode_tokens_per_second" in record:
        print(
            f"prefill {record['prefill_tokens_per_second']:.0f} tokens/s, "
            f"decode {record['decode_tokens_per_second']:.0f} tokens/s"
        )


def rounded_caches_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each format of a checkpoint's cache: bytes, loss, increase and KL."""
    cells = [
        [
            row["cache_format"],
            ", ".join(row["engines"]),
            f"{row['kv_bytes_per_token']:,}",
            percent(row["share"]),
            f"{row['loss']:.4f}",
            increase_of(row),
            "" if row["kl"] is None else f"{row['kl']:.3f}",
        ]
        for row in rows
    ]
    columns = ("cache", "engines", "KV bytes/token", "share", "loss", "loss increase", "KL")
    return Table(columns, cells)


def cache_words(cache: Mapping[str, Any], reference: str) -> str:
    """Return the size of a cache format, relative to `reference`, and the flags of engines."""
    flags = "; ".join(
        f"{engine} {words}" for engine, words in zip(cache["engines"], cache["flags"], strict=True)
    )
    return (
        f"a cache in {cache['cache_format']}: {cache['kv_bytes_per_token']:,} bytes per token, "
        f"{percent(cache['share'])} of the {reference} in 16 bits; {flags}"
    )


def print_extras(record: Mapping[str, Any]) -> None:
    """Print tasks, long contexts and generated text, if they were measured."""
    out = console(120)
    if "tasks" in record:
        out.print("\nTasks (± standard error):")
        out.print(tasks_table(record["tasks"]).for_terminal())
    if "long_context" in record:
        long_context = record["long_context"]
        out.print("\nLoss by position, nats per token:")
        out.print(position_table(long_context["loss_by_position"]).for_terminal())
        out.print(
            "\nRecall of a hidden line by depth: share of cases in which the hidden value is the "
            "most likely of four, and gain in log-probability over another hidden value:"
        )
        out.print(recall_table(long_context["recall"]).for_terminal())
    for generation in record.get("generations", ()):
        print_generation(generation)


def print_generation(generation: Mapping[str, Any]) -> None:
    """Print prompt and continuations, and the position where checkpoint and original differ."""
    out = console(120)
    out.rule(Text(f"{generation['prompt']!r:.100}"), align="left", characters="-")
    for model, text in generation["texts"].items():
        out.print(f"[{model}]", markup=False)
        out.print(text, markup=False, emoji=False, soft_wrap=True)
    if "original" in generation["texts"]:
        note = f"all {generation['tokens']} tokens are equal to those of the original"
        if generation["parts_at"] is not None:
            parts = generation["parts"]
            note = (
                f"{generation['parts_at']} equal tokens, then {parts['checkpoint']!r} instead of "
                f"{parts['original']!r} of the original"
            )
        out.print(f"-- {note}", markup=False, emoji=False)
