"""Trials that lead to the same model: one is trained, the others are recorded as copies of it.

Two different candidates may come to the same plan and the same weights, such as two ways of
grouping that end with the same groups. That is known once a candidate has been converted: its
training is then a function of those weights and of the job. The scheduler stops a trial whose work
another has reported before (`RungScheduler.copies`), and the scores of the first one count for its
copies too, for the searcher here and for tables in `orchestrator.storage.journal.load_trials`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attention.io.checkpoint import DIGESTS
from orchestrator.search.candidates import Candidate
from orchestrator.search.searchers import ResumableSearcher
from orchestrator.storage.json_files import read_if_there
from trainers.jobs.train_job import TrainJob

# Fields of a job that say where it runs and writes, and what it counts
_WITHOUT_EFFECT = (
    "model_dir", "out_dir", "storage_path", "run_name", "accelerator_type", "placement_strategy",
    "checkpoint_address", "start_tokens",
)  # fmt: skip


def work_digest(job: TrainJob, folder: Path) -> str:
    """Return a digest that is equal for trainings that would produce the same weights.

    It covers the job, except folders, nodes and counts, and the weights in the trial's folder at
    its start (`converted`; with a relaxation `start` too).
    """
    job = replace(job, checkpoint_minutes=None, checkpoint_steps=None)  # when, and not what
    record = {
        name: value
        for name, value in json.loads(job.to_json()).items()
        if name not in _WITHOUT_EFFECT
    }
    record["settings"] = job.settings.identity()
    if job.relaxation is not None and job.relaxation.settings is not None:
        record["relaxation"]["settings"] = job.relaxation.settings.identity()
    for name in ("converted", "start"):
        file = folder / name / DIGESTS
        digests = read_if_there(file)
        # The config next to the weights distinguishes plans that differ in more than weights
        record[name] = {
            k: v for k, v in digests.items() if k.endswith(".safetensors") or k == "config.json"
        }
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


class CopyingSearcher(ResumableSearcher):
    """Reports the scores and the end of a trial to `searcher` for each of its copies too.

    Args:
        copies: By copy, the first trial; it grows while the search runs.
    """

    def __init__(self, searcher: ResumableSearcher, copies: Mapping[str, str]) -> None:
        super().__init__(searcher.total)
        self.searcher, self._copies = searcher, copies
        self._reports: dict[str, list[dict]] = {}
        self._ends: dict[str, tuple[dict | None, bool]] = {}
        self._waiting: dict[str, list[str]] = {}

    def suggest(self, trial_id: str) -> Any:
        return self.searcher.suggest(trial_id)

    def upcoming(self, count: int) -> Sequence[Candidate]:
        return self.searcher.upcoming(count)

    def add_trial(self, trial_id: str, config: Mapping[str, Any]) -> None:
        self.searcher.add_trial(trial_id, config)

    def on_trial_result(self, trial_id: str, result: dict) -> None:
        self._reports.setdefault(trial_id, []).append(result)
        for each in (trial_id, *self._waiting.get(trial_id, ())):
            self.searcher.on_trial_result(each, result)

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        first = self._copies.get(trial_id)
        if first is None:
            self._ends[trial_id] = (result, error)
            for each in (trial_id, *self._waiting.pop(trial_id, ())):
                self.searcher.on_trial_complete(each, result, error)
            return
        for report in self._reports.get(first, ()):
            self.searcher.on_trial_result(trial_id, report)
        if first in self._ends:
            self.searcher.on_trial_complete(trial_id, *self._ends[first])
        else:
            self._waiting.setdefault(first, []).append(trial_id)

    def reopen(self, trial_id: str) -> None:
        """Expect further reports of a trial, and so of its copies."""
        copies = [copy for copy, first in self._copies.items() if first == trial_id]
        if self._ends.pop(trial_id, None) is not None and copies:
            self._waiting[trial_id] = copies
        for each in (trial_id, *copies):
            self.searcher.reopen(each)
