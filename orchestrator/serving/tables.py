"""The table that a check prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

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
        f"KV cache in {check['cache_dtype']}: {check['kv_bytes_per_token']:g} bytes a token by the engine's report, "
        f"{check['kv_bytes_per_token_promised']} promised; {check['capacity']:,} tokens in "
        f"{check['memory'] / 2**30:g} GiB",
        markup=False,
    )
