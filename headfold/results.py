"""Results of the functions: records that print well, with what can be done next."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

from transformers import PreTrainedModel
from typing_extensions import Unpack

from attention.checkpoint import Checkpoint
from attention.io import checkpoint as files
from orchestrator.config.options import ExportOptions
from orchestrator.reporting.evaluation_tables import (
    cache_words,
    eval_text_of,
    increase_of,
    polish_of,
)
from orchestrator.storage.records import percent
from orchestrator.tasks.export import Export


@dataclass(frozen=True, repr=False)
class VerbResult(Mapping[str, Any]):
    """A record, the same as the JSON of the verb, key by key."""

    record: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.record[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.record)

    def __len__(self) -> int:
        return len(self.record)

    def __repr__(self) -> str:
        return "\n".join(f"{name:<10} {value}" for name, value in self.lines().items())

    def lines(self) -> dict[str, str]:
        """Return the lines that are printed, by their labels."""
        return {key: str(value) for key, value in self.record.items()}


@dataclass(frozen=True, repr=False)
class Saved(VerbResult):
    """A record of a checkpoint that was written to `path`.

    Attributes:
        path: The folder.
        temporary: Keeps a folder that lasts as long as this object.
    """

    path: Path
    temporary: TemporaryDirectory[str] | None

    def load(self, dtype: Any = None, device: str = "cpu") -> PreTrainedModel:
        """Load the model in evaluation mode. `dtype` None is what it was written in."""
        return Checkpoint.open(self.path).load(dtype, device)

    def save(self, output_dir: str | Path, *, overwrite: bool = False) -> Path:
        """Copy the checkpoint to a folder, whole or not at all.

        Raises:
            OutputError: For a folder that may not be replaced.
        """

        def write(fresh: Path) -> None:
            shutil.copytree(self.path, fresh, dirs_exist_ok=True)

        return files.write_atomically(output_dir, write, overwrite=overwrite)

    def push_to_hub(self, repo_id: str) -> str:
        """Write a model card and upload the checkpoint; a new repository is private.

        Returns:
            Its address.

        Raises:
            ConfigError: If `repo_id` is no name of a repository.
            PushError: If the hub does not take it.
        """
        from orchestrator.reporting.card import CardFacts, write_card
        from orchestrator.storage.hub import check_repository, upload

        check_repository(repo_id)
        with TemporaryDirectory(prefix="headfold-") as folder:
            copy = self.save(Path(folder) / self.path.name)
            write_card(copy, CardFacts.of(self.path), repo_id)
            files.write_digests(copy)
            return upload(copy, repo_id)


@dataclass(frozen=True, repr=False)
class ExportResult(Saved):
    """An export for an engine."""

    def lines(self) -> dict[str, str]:
        record = self.record
        exact = "exact"
        if not record["exact"]:
            exact = f"logits differ by {record['max_logit_difference']:.2g} at most"
        return {
            "export": f"{record['target']}, {exact}: {self.path}",
            "KV cache": f"{record['kv_bytes_per_token_after']:,} bytes per token",
            **_engine_lines(record, "original"),
            "loaded by": ", ".join(record["loads_in"]),
        }


@dataclass(frozen=True, repr=False)
class ConversionResult(Saved):
    """A converted checkpoint."""

    def lines(self) -> dict[str, str]:
        record = self.record
        before = record["kv_bytes_per_token_original"]
        perplexities = (
            f"{record['original_perplexity']:.2f} before, {record['perplexity']:.2f} after"
        )
        loss = f"loss {increase_of(record)} nats per token"
        sizes = f"{record['kv_bytes_per_token']:,} of {before:,} bytes per token"
        return {
            "converted": f"{record['model']} by {record['recipe']['name']}: {self.path}",
            **({"polish": polish_of(record["polish"])} if "polish" in record else {}),
            "perplexity": f"{perplexities} ({loss}), on {eval_text_of(record)}",
            "KV cache": f"{sizes} ({percent(record['kv_ratio'])})",
            **_engine_lines(record, "original"),
            "loaded by": ", ".join(record["loads_in"]),
        }

    def export(
        self,
        target: str = "auto",
        output_dir: str | Path | None = None,
        **options: Unpack[ExportArguments],
    ) -> ExportResult:
        """Write it in a format that an engine loads; see `headfold.export`."""
        return export_to(self.path, target, output_dir, **options)


@dataclass(frozen=True, repr=False)
class EvaluationResult(VerbResult):
    """Loss, perplexity and KV cache of a checkpoint."""

    def lines(self) -> dict[str, str]:
        record = self.record
        if "perplexity" not in record:  # measured in an engine
            return super().lines()
        perplexity = f"{record['perplexity']:.2f}"
        if record.get("original_perplexity") is not None:
            perplexity += f", {record['original_perplexity']:.2f} of the original"
            perplexity += f" (loss {increase_of(record)} nats per token)"
        share = f"{percent(record['kv_ratio'])} of {record['kv_ratio_of']}"
        return {
            "checkpoint": record["checkpoint"],
            "perplexity": f"{perplexity}, on {eval_text_of(record)}",
            "KV cache": f"{record['kv_bytes_per_token']:,} bytes per token, {share}",
            **_engine_lines(record, "original" if record["original"] else "model"),
        }


@dataclass(frozen=True, repr=False)
class InspectionResult(VerbResult):
    """Which heads matter, which are alike, and what recipes cost."""

    def lines(self) -> dict[str, str]:
        record = self.record
        heads = f"{record['layers']} layers of {record['kv_heads']} KV heads"
        lines = {
            "model": f"{record['model']}: {heads}",
            "perplexity": f"{record['original_perplexity']:.2f}, on {eval_text_of(record)}",
        }
        for entry in record["recipes"]:
            label = f"{entry['recipe']} at {percent(entry['kv_ratio_asked'])}"
            lines[label] = entry.get("why_not") or f"loss {increase_of(entry)} nats per token"
        return lines

    def save(self, page: str | Path) -> Path:
        """Write the page that `headfold inspect` writes."""
        from orchestrator.reporting.pages.inspection_page import build_page
        from orchestrator.storage.outputs import write_page

        return write_page(page, build_page(dict(self.record)))


def _engine_lines(record: Mapping[str, Any], reference: str) -> dict[str, str]:
    """Return the lines on formats of an engine's cache, relative to `reference`."""
    lines: dict[str, str] = {}
    if cache := record.get("engine_cache"):
        lines["in engine"] = cache_words(cache, reference)
        if "loss_increase" in cache:
            lines["in engine"] += f"; loss increase {increase_of(cache)}"
    for row in record.get("rounded_caches", ()):
        bytes_per_token = f"{row['kv_bytes_per_token']:,} bytes per token"
        lines[row["cache_format"]] = f"{bytes_per_token}, loss increase {increase_of(row)}"
    return lines


class ExportArguments(TypedDict, total=False):
    """Options of an export (`orchestrator.config.options.ExportOptions`)."""

    dtype: str
    allow_larger_cache: bool
    cache_format: str | None
    check: bool
    engine: str | None
    engine_python: str | None
    check_memory: int
    overwrite: bool
    dequantize: bool


def export_to(
    source: str | Path | Checkpoint,
    target: str,
    output_dir: str | Path | None,
    **options: Unpack[ExportArguments],
) -> ExportResult:
    """Export a checkpoint to a folder, or to one that lasts as long as what is returned."""
    folder, temporary = export_folder(output_dir, "export")
    task = Export(ExportOptions(checkpoint=source, target=target, out=folder, **options))
    return ExportResult(task.run(), folder, temporary)


def export_folder(
    output_dir: str | Path | None, name: str
) -> tuple[Path, TemporaryDirectory[str] | None]:
    """Return the folder that a result is written to, and what keeps it if it is temporary."""
    if output_dir is not None:
        return Path(output_dir), None
    temporary = TemporaryDirectory(prefix="headfold-")
    return Path(temporary.name) / name, temporary
