"""Folders from elsewhere, names that lead out of the storage, and secrets in addresses."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from journals import write_journal

from orchestrator.config.schema import ConfigError, parse_config
from orchestrator.storage import records
from orchestrator.storage.paths import SearchFolder, storage_path
from orchestrator.storage.records import TrialRecord
from orchestrator.storage.trust import check_origin, doubts
from orchestrator.tracking.errors import redact


@pytest.fixture
def folder(tmp_path: Path) -> SearchFolder:
    created = SearchFolder.fresh(tmp_path / "runs", "mine")
    write_journal(created.root)
    created.snapshot.write_text("name: mine\n")
    return created


def save(folder: SearchFolder, checkpoint: Path | str) -> None:
    rungs = [{"step": 8, "loss": 2.0, "checkpoint_path": str(checkpoint)}]
    write_journal(folder.root, [TrialRecord("t1", "gqa", 0.5, 1e-3, {}, records.DONE, rungs, 8)])


def test_an_own_search_is_read_without_a_warning(folder: SearchFolder, capsys: pytest.CaptureFixture[str]) -> None:
    save(folder, folder.train / "t1" / "checkpoint")
    check_origin(folder)
    assert capsys.readouterr().err == ""


def test_a_folder_that_was_moved_is_refused_and_one_of_unknown_origin_is_warned_of(
    folder: SearchFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(folder, folder.train / "t1" / "checkpoint")
    moved = SearchFolder(tmp_path / "downloads")
    shutil.copytree(folder.root, moved.root)
    (tmp_path / "link").symlink_to(folder.root)
    check_origin(SearchFolder(tmp_path / "link"))
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match=f"was made as {folder.root}, and its records name files there"):
        check_origin(moved)
    (moved.root / "origin.json").unlink()
    check_origin(moved)
    output = capsys.readouterr().err
    assert str(moved.root) in output and "does not say where it was made" in output and "pickles" in output


def test_a_search_at_an_address_is_continued_with_its_home(
    folder: SearchFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADFOLD_HOME", str(tmp_path))
    at_address = SearchFolder.fresh(storage_path("s3://bucket/runs"), "mine")
    at_address.snapshot.write_text("storage: s3://bucket/runs\n")
    check_origin(at_address)
    monkeypatch.setenv("HEADFOLD_HOME", str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="belongs to s3://bucket/runs, whose working folder here is .*HEADFOLD_HOME"):
        check_origin(at_address)


@pytest.mark.parametrize("where", ["/tmp/elsewhere", "ROOT/../other/checkpoint", "ROOT/link/checkpoint"])
def test_a_checkpoint_outside_of_the_folder_is_warned_of(folder: SearchFolder, where: str) -> None:
    (folder.root / "link").symlink_to("/tmp")
    save(folder, where.replace("ROOT", str(folder.root)))
    assert any("outside" in doubt for doubt in doubts(folder))


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root may give a folder away")
def test_a_folder_of_another_user_is_warned_of(folder: SearchFolder) -> None:
    os.chown(folder.root, 12_345, -1)
    assert any("12345" in doubt for doubt in doubts(folder))


NASTY = (
    "..",
    ".",
    "../x",
    "a/../../b",
    "/etc",
    "a\\b",
    "-rf",
    "",
    " ",
    "a\n",
    "a\x00b",
    "~",
    "$HOME",
    "C:x",
    "x" * 300,
)


@pytest.mark.parametrize("name", NASTY)
def test_no_name_leads_out_of_the_storage(folder: SearchFolder, name: str) -> None:
    with pytest.raises(ConfigError):
        folder.trial(name)
    sound = {"name": "a", "model": {"path": "m"}, "search": {"kv_ratios": [0.5]}}

    def records(name: str) -> dict[str, dict[str, Any]]:
        arm = {"recipe": "gqa", "label": name}
        return {
            "name": {"name": name},
            "promotion.registered_name": {"promotion": {"registered_name": name}},
            "label": {"search": {"kv_ratios": [0.5], "recipes": [arm]}},
        }

    for changes in records("sound").values():
        parse_config({**sound, **changes})
    for key, changes in records(name).items():
        with pytest.raises(ConfigError, match=re.escape(key)):
            parse_config({**sound, **changes})


def test_records_from_elsewhere_cannot_name_a_path(folder: SearchFolder) -> None:
    save(folder, "x")
    folder.journal.write_text(folder.journal.read_text().replace('"trial": "t1"', '"trial": "../../../etc"'))
    from orchestrator.reporting.pages.report_page import write_report

    folder.original.write_text(json.dumps({"loss": 2.0, "kv_bytes_per_token": 8}))
    with pytest.raises(ConfigError, match="no trial's id"):
        write_report(folder.root)


@pytest.mark.parametrize(
    ("address", "hidden"),
    [
        ("http://user:hunter2@host:5000/x", "hunter2"),
        ("https://hunter2@host", "hunter2"),
        ("postgresql+psycopg://u:hunter2@h/db", "hunter2"),
        ("see https://h/x?api_key=hunter2&b=1 there", "hunter2"),
        ("s3://bucket/x?X-Amz-Signature=hunter2", "hunter2"),
        ("https://h/x?access_token=hunter2'", "hunter2"),
    ],
)
def test_secrets_of_addresses_are_hidden(address: str, hidden: str) -> None:
    report = redact(address)
    assert hidden not in report and "***" in report
    assert redact("sqlite:////tmp/mlflow.db and https://host/x?page=2") == (
        "sqlite:////tmp/mlflow.db and https://host/x?page=2"
    )
