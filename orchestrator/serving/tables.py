"""The tables that a check and a measurement of speed print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from orchestrator.reporting import tables
from orchestrator.reporting.console import console


def print_check(check: Mapping[str, Any]) -> None:
    """What an engine has shown of an export (`orchestrator.serving.check.CheckResult`)."""
    table = Table(title=f"{check['engine']} ({check['version']})", title_justify="left")
    for name in ("run", "same greedy tokens", "largest difference of log-probabilities", "allowed"):
        table.add_column(name, justify="left" if name == "run" else "right")
    for run in check["runs"]:
        same = f"{run['same']} of {run['prompts']} prompts ({run['tokens']} tokens)"
        table.add_row(run["how"], same, f"{run['difference']:.2g}", f"{run['tolerance']:g}")
    out = console()
    out.print(table)
    out.print(
        f"KV cache in {check['cache_dtype']}: {check['kv_bytes_per_token']:g} bytes per token by the engine's report, "
        f"{check['kv_bytes_per_token_promised']} promised; {check['capacity']:,} tokens in "
        f"{check['memory'] / 2**30:g} GiB",
        markup=False,
    )


COLUMNS = ("context", "model", "prefill tokens/s", "decode tokens/s", "KV bytes/token", "sequences that fit")


def speed_table(record: Mapping[str, Any]) -> tables.Table:
    """A row for each model at each context length, and one of ratios (`orchestrator.serving.speed.engine_speed`)."""
    rows, models = [], record["models"]
    for at in record["context_lengths"]:
        for key in reversed(models):  # the original first
            prefill, decode, sequences = at[key].values()
            speeds = [f"{prefill:,.0f}", f"{decode:,.1f}", f"{models[key]['kv_bytes_per_token']:,.0f}"]
            rows.append([f"{at['context_length']}", key, *speeds, f"{sequences:,}"])
        if "ratios" in at:
            prefill, decode, sequences = at["ratios"].values()
            held = models["checkpoint"]["kv_bytes_per_token"] / models["original"]["kv_bytes_per_token"]
            fit = "" if sequences is None else f"{sequences:.2f} x"
            rows.append(["", "ratio", f"{prefill:.2f} x", f"{decode:.2f} x", f"{held:.2f} x", fit])
    return tables.Table(COLUMNS, rows)


def print_speed(record: Mapping[str, Any]) -> None:
    """What `headfold evaluate --engine` has measured."""
    out, kept = console(), record["models"]["checkpoint"]
    out.print(
        f"{record['engine']} ({record['version']}), one sequence at a time, {record['speed_tokens']} tokens decoded, "
        f"medians of {record['measurements']}; cache in {kept['cache_dtype']}, of {record['memory'] / 2**30:g} GiB:",
        markup=False,
    )
    out.print(speed_table(record).for_terminal())
