"""`headfold export`: one checkpoint in a format that engines load.

A model card is written with it, and it is uploaded on request.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NotRequired, TypedDict

from attention.checkpoint import Checkpoint
from attention.ratios import percent
from attention.tensor_parallel import RankCache
from orchestrator import checkpoints
from orchestrator.config.options import ExportOptions
from orchestrator.config.schema import ConfigError
from orchestrator.reporting.card import CARD, CardFacts, write_card
from orchestrator.serving.export import EngineExportRecord, export_checkpoint
from orchestrator.serving.tables import print_check
from orchestrator.storage.hub import check_repository, size_of, to_upload, upload
from orchestrator.tasks.task import Task, require


class Push(TypedDict):
    """An upload to the hub: done, or only shown if `uploaded` is None."""

    repository: str
    files: dict[str, int]
    """Bytes of each."""
    uploaded: str | None
    """The address."""


class ExportRecord(EngineExportRecord):
    """The JSON of `headfold export`."""

    card: NotRequired[str]
    push: NotRequired[Push]


class Export(Task[ExportOptions, ExportRecord]):
    """An export, written, read back and compared."""

    @property
    def outputs(self) -> Mapping[str, str | Path | None]:
        return {"folder": self.options.out}

    def check(self) -> None:
        check_repository(self.options.push)
        if self.options.push is None and not self.options.dry_run:
            raise ConfigError(
                "dry_run: nothing is uploaded without the name of a repository; add --push "
                "OWNER/NAME, or leave out --no-dry-run"
            )
        require(self.checkpoint)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint to export."""
        opened = checkpoints.open_model(
            self.options.checkpoint, "checkpoint", dequantize=self.options.dequantize
        )
        return checkpoints.open_checkpoint(opened, "checkpoint")

    def run(self) -> ExportRecord:
        """Export and write the card; upload if `push` names a repository, except in a dry run.

        Raises:
            ConfigError: For what a user can mend. Likewise TargetError, LargerCacheError,
                EngineError, OutputError.
            CheckError: If the engine computes different results, or EngineFailure if it fails;
                nothing is written.
            PushError: If the hub refuses it; the export is kept.
        """
        self.check()
        out, push = Path(self.options.out), self.options.push
        options = replace(self.options, checkpoint=self.checkpoint)
        record: ExportRecord = {**export_checkpoint(options, self._write_card)}
        record["card"] = str(out / CARD)
        if push is not None:
            files = to_upload(out)
            uploaded = None if self.options.dry_run else upload(out, push)
            record["push"] = {"repository": push, "files": files, "uploaded": uploaded}
        return record

    def _write_card(self, folder: Path, ranks: RankCache | None) -> None:
        """Write the model card into the folder of an export before it is put in place."""
        facts = CardFacts.of(self.checkpoint.folder, self.checkpoint.path)
        if self.options.cache_format is not None:
            facts = replace(facts, cache_format=self.options.cache_format)
        if ranks is not None:
            facts = replace(facts, tensor_parallel=ranks.record())
        name = Path(self.options.out).absolute().name
        write_card(folder, facts, self.options.push, name)

    def show(self, record: ExportRecord) -> None:
        original, after = record["kv_bytes_per_token_original"], record["kv_bytes_per_token_after"]
        share = "" if original is None else f" ({percent(after / original)} of the original's)"
        print(
            f"{record['model_type']} in {self.options.out}: "
            f"{'exact' if record['exact'] else 'not exact'}, largest logit difference "
            f"{record['max_logit_difference']:.2g}; KV bytes per token "
            f"{record['kv_bytes_per_token_before']} before, {after} after{share}"
        )
        print(record["format_note"])
        if cache := record.get("engine_cache"):
            print(
                f"with a cache in {cache['cache_format']}: {cache['kv_bytes_per_token']:,} bytes "
                f"per token; measure it: headfold evaluate "
                f"{shlex.quote(self.checkpoint.path)} --cache-format {cache['cache_format']}"
            )
            for engine, flags in zip(cache["engines"], cache["flags"], strict=True):
                if engine in record["engines"]:
                    print(f"{engine}: {flags}")
        if ranks := record.get("tensor_parallel"):
            print(f"tensor parallelism: {ranks['note']}")
        for note in record["notes"]:
            print(f"note: {note}")
        for name, why in record["other_targets"].items():
            print(f"not {name}: {why}")
        if record["check"]:
            print_check(record["check"])
        print(f"model card: {record.get('card')}")
        if "push" in record:
            self._show_push(record["push"], record["target"])

    def _show_push(self, push: Push, target: str) -> None:
        files, repository = push["files"], push["repository"]
        print(f"for {repository}: {len(files)} files, {size_of(sum(files.values()))}")
        for name, count in files.items():
            print(f"  {name}  {size_of(count)}")
        if push["uploaded"] is not None:
            print(
                f"uploaded: {push['uploaded']} (a new repository is private until you change that "
                "on its page)"
            )
            return
        again = [
            "headfold",
            "export",
            self.checkpoint.path,
            "--target",
            target,
            "--out",
            str(self.options.out),
        ]
        command = shlex.join([*again, "--overwrite", "--push", repository, "--no-dry-run"])
        print(f"nothing was uploaded; this does it (any other options as before): {command}")
