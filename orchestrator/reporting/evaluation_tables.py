"""What `headfold evaluate` prints, from its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attention.ratios import percent
from orchestrator.reporting.console import console
from orchestrator.reporting.tables import Table
from orchestrator.storage.records import unmet

STDERR = "_stderr"
TASKS = ("task", "metric", "items")


def tasks_table(tasks: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    """A row for each metric of each task, a column for each model: value ± standard error. `tasks`: scores by model."""
    models, rows = list(tasks), []
    for name, scores in tasks[models[0]].items():
        for metric in (key for key in scores if key != "items" and STDERR not in key):
            cells = [_score(tasks[model].get(name, {}), metric) for model in models]
            rows.append([name, metric, f"{scores.get('items', '')}", *cells])
    return Table((*TASKS, *models), rows)


def _score(scores: Mapping[str, float], metric: str) -> str:
    if metric not in scores:
        return ""
    name, dot, kept = metric.partition(".")
    error = scores.get(f"{name}{STDERR}{dot}{kept}")
    return f"{scores[metric]:.3f}" + ("" if error is None else f" ± {error:.3f}")


def position_table(losses: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    """Loss in nats of each range of positions, a column for each model."""
    models = list(losses)
    rows = [
        [f"{part['from']} to {part['to'] - 1}", *(f"{losses[model][index]['loss']:.3f}" for model in models)]
        for index, part in enumerate(losses[models[0]])
    ]
    return Table(("positions", *models), rows)


def recall_table(recall: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]) -> Table:
    """Recall and margin of each context length and depth, a column for each model."""
    models, rows = list(recall), []
    for length, depths in recall[models[0]].items():
        for index, depth in enumerate(depths):
            seen = [recall[model][length][index] for model in models]
            cells = [f"{one['recall']:.2f}, {one['margin']:+.2f} ± {one['margin_stderr']:.2f}" for one in seen]
            rows.append([length, f"{depth['depth']:.0%}", *cells])
    return Table(("context", "depth", *models), rows)


def increase_of(record: Mapping[str, Any]) -> str:
    """The increase of the loss, with its standard error where more than one sequence was measured."""
    error = record.get("loss_increase_stderr")
    return f"{record['loss_increase']:+.3f}" + ("" if error is None else f" ± {error:.3f}")


def eval_text_of(record: Mapping[str, Any]) -> str:
    """What a loss was measured on."""
    left_out = record.get("eval_documents_left_out")
    less = f" ({left_out} documents left out that are calibrated on)" if left_out else ""
    return f"{record['eval_tokens']:,} tokens of {record['eval_data']}{less}"


def print_conversion(record: Mapping[str, Any], out: Any) -> None:
    """Losses before and after and what loads the result, from a record of `headfold convert`, saved to `out` if
    anywhere."""
    points = [{**record, **point} for point in record.get("points", [{}])]
    for point in points:
        print(
            f"{point['recipe']['name']} at {percent(point['kv_ratio'])} of the checkpoint's KV cache{unmet(point)}: "
            f"held-out loss {point['original_loss']:.3f} before, {point['loss']:.3f} after ({increase_of(point)} nats "
            f"per token), perplexity {point['original_perplexity']:.2f} before, {point['perplexity']:.2f} after, KL "
            f"{point['kl']:.3f}, on {eval_text_of(point)}; {point['kv_bytes_per_token']} KV bytes per token, "
            f"{point['kv_bytes_per_token_original']} before"
        )
        for note in (*([point["format_note"]] if out is not None else []), *point.get("notes", ())):
            print(note)
    if out is not None:
        several = "points" in record
        print(f"checkpoints, curve.json and curve.png: {out}" if several else f"checkpoint: {record['out']}")


def print_evaluation(record: Mapping[str, Any]) -> None:
    """Loss, cache and speed, from a record of `headfold evaluate`."""
    print(
        f"held-out loss {record['loss']:.3f} nats per token, perplexity {record['perplexity']:.2f}, on "
        f"{eval_text_of(record)}"
    )
    for note in record.get("notes", ()):
        print(f"note: {note}")
    if record["original"] is not None:
        print(
            f"original model {record['original_loss']:.3f}, perplexity {record['original_perplexity']:.2f}; loss "
            f"increase {increase_of(record)} nats per token, KL {record['kl']:.3f}"
        )
    if record["baseline"] is not None:
        print(f"baseline {record['baseline_loss']:.3f}")
    print(
        f"KV cache: {percent(record['kv_ratio'])} of {record['kv_ratio_of']}; "
        f"{record['kv_bytes_per_token']} bytes per token planned, "
        f"{record['cache_bytes_measured']} held after {record['cache_tokens']} tokens"
    )
    if "decode_tokens_per_second" in record:
        print(
            f"prefill {record['prefill_tokens_per_second']:.0f} tokens/s, "
            f"decode {record['decode_tokens_per_second']:.0f} tokens/s"
        )


def print_extras(record: Mapping[str, Any]) -> None:
    """Tables of what was asked for."""
    out = console(120)
    if "tasks" in record:
        out.print("\nTasks (± standard error):")
        out.print(tasks_table(record["tasks"]).for_terminal())
    if "long_context" in record:
        found = record["long_context"]
        out.print("\nLoss by position, nats per token:")
        out.print(position_table(found["loss_by_position"]).for_terminal())
        out.print(
            "\nRecall of a hidden line by its depth: share right of 4 values, what hiding adds to log-probability:"
        )
        out.print(recall_table(found["recall"]).for_terminal())
    for generation in record.get("generations", ()):
        print_generation(generation)


def print_generation(generation: Mapping[str, Any]) -> None:
    """Prompt and continuations, and the token at which checkpoint and original part."""
    out, at = console(120), generation["parts_at"]
    out.rule(f"{generation['prompt']!r:.100}", align="left", characters="-")
    for model, text in generation["texts"].items():
        out.print(f"[{model}]", markup=False)
        out.print(text, markup=False, soft_wrap=True)
    if "original" in generation["texts"]:
        parts = generation["parts"]
        said = f"all {generation['tokens']} tokens are the original's"
        if at is not None:
            said = f"{at} tokens alike, then {parts['checkpoint']!r} for the original's {parts['original']!r}"
        out.print(f"-- {said}", markup=False)
