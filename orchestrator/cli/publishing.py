"""What `export` does with a finished checkpoint: a model card, and where asked for an upload to the hub."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def _repository(name: str | None) -> str | None:
    if name is None:
        return None
    from orchestrator.storage.hub import check_repository  # before anything is exported

    return check_repository(name)


Push = Annotated[
    str | None,
    typer.Option(
        "--push",
        metavar="OWNER/NAME",
        callback=_repository,
        help="Show what would be uploaded to this repository of the Hugging Face hub.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run/--no-dry-run", help="Of --push: only show, or upload.")]


def publish(source: Path, out: Path, target: str, push: str | None, dry_run: bool) -> dict[str, Any]:
    """Write the card of the export in `out`, made from `source`; show or do the upload. Returns what a record takes
    over of it. Raises PushError if the hub does not take it; the export stays."""
    from attention.io.checkpoint import write_digests
    from orchestrator.reporting.card import CardFacts, write_card
    from orchestrator.storage.hub import size_of, to_upload, upload

    card = write_card(out, CardFacts.of(source), push)
    write_digests(out)
    print(f"model card: {card}")
    if push is None:
        return {"card": str(card)}
    files = to_upload(out)
    _show(files, push, size_of)
    address = None
    if dry_run:
        again = ["headfold", "export", str(source), "--target", target, "--out", str(out), "--overwrite"]
        command = shlex.join([*again, "--push", push, "--no-dry-run"])
        print(f"nothing was uploaded; this does it (any other options as before): {command}")
    else:
        address = upload(out, push)
        print(f"uploaded: {address} (a new repository is private until you change that on its page)")
    return {"card": str(card), "push": {"repository": push, "files": files, "uploaded": address}}


def _show(files: Mapping[str, int], push: str, size_of: Any) -> None:
    print(f"for {push}: {len(files)} files, {size_of(sum(files.values()))}")
    for name, count in files.items():
        print(f"  {name}  {size_of(count)}")
