"""The tables that a check and a measurement of speed print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from orchestrator.reporting import tables
from orchestrator.reporting.console import console
from orchestrator.reporting.evaluation_tables import increase_of


def print_check(check: Mapping[str, Any]) -> None:
    """Print what an engine has shown of an export (`orchestrator.serving.check.CheckResult`)."""
    table = Table(title=f"{check['engine']} ({check['version']})", title_justify="left")
    for name in ("run", "same greedy tokens", "largest difference of log-probabilities", "allowed"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for run in check["runs"]:
        same = f"{run['same']} of {run['prompts']} prompts ({run['tokens']} tokens)"
        table.add_row(run["how"], same, f"{run['difference']:.2g}", f"{run['tolerance']:.2g}")
    out = console()
    out.print(table)
    out.print(
        f"KV cache in {check['cache_dtype']}: {check['kv_bytes_per_token']:g} bytes per token by "
        f"the engine's report, {check['kv_bytes_per_token_promised']} promised; "
        f"{check['capacity']:,} tokens in {check['memory'] / 2**30:g} GiB",
        markup=False,
    )


_COLUMNS = (
    "context",
    "model",
    "prefill tokens/s",
    "decode tokens/s",
    "KV bytes/token",
    "sequences that fit",
)


def speed_table(record: Mapping[str, Any]) -> tables.Table:
    """Return a row for each model at each context length, and one of ratios."""
    rows, models = [], record["models"]
    for at in record["context_lengths"]:
        for key in reversed(models):  # the original first
            prefill, decode, sequences = at[key].values()
            speeds = [
                f"{prefill:,.0f}",
                f"{decode:,.1f}",
                f"{models[key]['kv_bytes_per_token']:,.0f}",
            ]
            rows.append([f"{at['context_length']}", key, *speeds, f"{sequences:,}"])
        if "ratios" in at:
            prefill, decode, sequences = at["ratios"].values()
            model_bytes, other = (
                models[key]["kv_bytes_per_token"] for key in ("checkpoint", "original")
            )
            ratios = [f"{prefill:.2f} x", f"{decode:.2f} x", f"{model_bytes / other:.2f} x"]
            rows.append(["", "ratio", *ratios, "" if sequences is None else f"{sequences:.2f} x"])
    return tables.Table(_COLUMNS, rows)


def cache_types_table(record: Mapping[str, Any]) -> tables.Table:
    """Return a row for each model with each format of its cache."""
    columns = ("model", "cache", "KV bytes/token", "share", "loss", "loss increase")
    columns += ("prefill tokens/s", "decode tokens/s")[: 2 * bool(record["speed_tokens"])]
    columns += ("sequences that fit",)
    rows = [
        [
            row["model"],
            row["cache_format"],
            f"{row['kv_bytes_per_token']:,.0f}",
            f"{row['share']:.1%}",
            f"{row['loss']:.4f}",
            "" if row is record["cache_types"][0] else increase_of(row),
            *_speeds(row),
            f"{row['sequences']:,}",
        ]
        for row in record["cache_types"]
    ]
    return tables.Table(columns, rows)


def _speeds(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of the speeds, if they were measured."""
    if "decode_tokens_per_second" not in row:
        return []
    return [f"{row['prefill_tokens_per_second']:,.0f}", f"{row['decode_tokens_per_second']:,.1f}"]


def print_cache_types(record: Mapping[str, Any]) -> None:
    """Print what `headfold evaluate --engine ENGINE --cache-types` has measured."""
    out, rows = console(), record["cache_types"]
    left_out = record["left_out_tokens"]
    out.print(
        f"{record['engine']} ({record['version']}), weights in {record['dtype']}; loss of "
        f"{record['eval_tokens']:,} tokens of {record['eval_data']} in sequences of "
        f"{record['sequence_length']}"
        + (f" ({left_out:,} within a character left out)" if left_out else "")
        + f", increase and share relative to the {record['reference']} in "
        f"{rows[0]['cache_format']}; "
        + (
            f"speed of one sequence of {record['context_length']}, {record['speed_tokens']} tokens "
            f"of it decoded, medians of {record['measurements']}; "
            if record["speed_tokens"]
            else ""
        )
        + f"sequences of {record['context_length']} in "
        f"{record['memory'] / 2**30:g} GiB:",
        markup=False,
    )
    out.print(cache_types_table(record).for_terminal())
    if record["device"] == "cpu" and any(row["cache_format"] == "fp8" for row in rows):
        out.print(
            "vLLM rounds fp8 toward zero on a CPU, and to the nearest on GPUs: the loss there is "
            "what --cache-format fp8 measures.",
            markup=False,
        )


def print_speed(record: Mapping[str, Any]) -> None:
    """Print what `headfold evaluate --engine` has measured."""
    out = console()
    out.print(
        f"{record['engine']} ({record['version']}), one sequence at a time, "
        f"{record['speed_tokens']} tokens decoded, medians of {record['measurements']}; cache in "
        f"{record['models']['checkpoint']['cache_dtype']}, of {record['memory'] / 2**30:g} GiB:",
        markup=False,
    )
    out.print(speed_table(record).for_terminal())
