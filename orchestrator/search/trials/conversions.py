"""The conversions of a search: each is made once, and shared by every training that begins with it.

A converted model follows from the original model and its statistics, the plan, and how heads are
aligned, fused and refined; it does not depend on learning rate, recovery, or a seed that leads to
the same plan.

<search>/.conversions/
    <digest>/            converted/, start/ where a relaxation begins there, plan.json, record.json
    candidates/<key>.json    the conversion that a candidate led to, and the cost of its plan
    locks/<key>          locked by the process that makes the conversion of a candidate
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from attention.io import checkpoint
from attention.io.file_lock import file_lock
from attention.io.replacing import DIGESTS, unused
from attention.plan import AttentionPlan
from orchestrator.search.candidates import Candidate
from orchestrator.search.trials.context import TrialContext
from orchestrator.storage.json_files import read_json, write_json
from orchestrator.training.run import TrainingReport

_FOLDER = ".conversions"
"""Hidden, so that its links are not copied to storage at an address: trials have the same files."""
_PARTS = ("converted", "start")


class _Conversion(TypedDict):
    """`record.json` of a conversion.

    Attributes:
        facts: The report of rung 0, except the parts about its own trial.
        cost: Of converting and refining (`orchestrator.conversion.execution.cost`).
    """

    facts: TrainingReport
    cost: dict[str, float]


class _CandidateConversion(TypedDict):
    """The file of a candidate.

    Attributes:
        conversion: The digest of its conversion.
        plan_cost: Of finding its plan.
    """

    conversion: str
    plan_cost: dict[str, float]


def conversion_key(candidate: Candidate, context: TrialContext) -> str:
    """Return a digest of everything that the conversion of a candidate depends on."""
    phase = context.search_phase(candidate)
    return _digest(
        _of_context(candidate, context),
        candidate.recipe.conversion_choices,
        float(candidate.used_ratio),
        candidate.plan,
        candidate.seed,
        phase and phase.file(context.calibration_cache).name,
    )


def conversion_digest(
    candidate: Candidate,
    context: TrialContext,
    plan: AttentionPlan,
    layer_steps: Sequence[int] | None,
) -> str:
    """Return the digest of the conversion to a plan, however the plan was found.

    Args:
        candidate: Its recipe converts.
        context: What trials share.
        plan: The plan.
        layer_steps: Steps of the local fit of each layer.
    """
    recipe = candidate.recipe
    axes = ("alignment", "fusion", "refinement")
    parts = {axis: (getattr(recipe, axis), recipe.knobs(axis)) for axis in axes}
    return _digest(_of_context(candidate, context), plan.to_json(), parts, layer_steps)


def _of_context(candidate: Candidate, context: TrialContext) -> tuple[object, ...]:
    """Return what a conversion and its rung 0 depend on, other than the recipe and its plan.

    Of the training, that is the number of sequences measured at a time, and whether it relaxes.
    """
    settings = context.settings(candidate.recipe, candidate.learning_rate)
    return (
        context.weights or context.model,
        context.dtype,
        context.device,
        context.calibration_file,
        context.mixed_moments,
        context.eval_file,
        settings.device_batch_size,
        context.relaxation_steps(candidate.recipe) > 0,
        candidate.plan is not None,
    )


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class ConversionLibrary:
    """The conversions of a search, which every node sees.

    Weights are hard links of those in the trials' folders, so that they take no space as long as
    one of these trials has them. On a file system without such links nothing is added.

    Attributes:
        root: Its folder.
    """

    root: Path

    @classmethod
    def of_search(cls, folder: str | Path) -> ConversionLibrary:
        """Return the library of the search in a folder."""
        return cls(Path(folder) / _FOLDER)

    def has(self, key: str) -> bool:
        """Return whether the conversion of a candidate exists."""
        named = self._of_candidate(key)
        return named is not None and (self.root / named["conversion"] / "record.json").is_file()

    # ---- the reader ------------------------------------------------------------------------------

    def take(self, key: str, candidate: Candidate, folder: Path) -> TrainingReport | None:
        """Put the conversion of a candidate into its trial's folder.

        Args:
            key: `conversion_key` of the candidate.
            candidate: The candidate.
            folder: Of its trial.

        Returns:
            The report of rung 0, without what the trial itself did; None if there is no conversion.
        """
        named = self._of_candidate(key)
        if named is None:
            return None
        return self.take_conversion(named["conversion"], named["plan_cost"], candidate, folder)

    def take_conversion(
        self, digest: str, plan_cost: Mapping[str, float], candidate: Candidate, folder: Path
    ) -> TrainingReport | None:
        """Do the same as `take`, for a conversion by its digest.

        Args:
            digest: Of the conversion.
            plan_cost: Of finding the candidate's plan.
            candidate: The candidate.
            folder: Of its trial.
        """
        source = self.root / digest
        # Another process may remove what no candidate to come needs
        with contextlib.suppress(OSError):
            if not (source / "record.json").is_file():
                return None
            parts = [part for part in _PARTS if (source / part).is_dir()]
            if not parts or not all(checkpoint.intact(source / part) for part in parts):
                shutil.rmtree(source, ignore_errors=True)
                return None
            record: _Conversion = read_json(source / "record.json")
            plan_text = (source / "plan.json").read_text(encoding="utf-8")
            plan = AttentionPlan.from_json(plan_text)
            for part in parts:
                note = conversion_note(candidate, part, checkpoint.carried(source / part))
                _put(source / part, folder / part, plan, note)
            write_json(folder / "recipe.json", candidate.config())
            (folder / "plan.json").write_text(plan_text, encoding="utf-8")
            cost = add_costs(plan_cost, record["cost"])
            return {**record["facts"], "seed": candidate.seed, "conversion_cost": cost}
        return None

    # ---- the writer ------------------------------------------------------------------------------

    def add(
        self,
        key: str,
        digest: str,
        folder: Path,
        facts: TrainingReport,
        plan_cost: Mapping[str, float],
        cost: Mapping[str, float],
    ) -> None:
        """Add the conversion in a trial's folder.

        Args:
            key: `conversion_key` of the trial's candidate.
            digest: `conversion_digest` of what it led to.
            folder: Of the trial.
            facts: The report of rung 0, but for what the trial itself did.
            plan_cost: Of finding the plan.
            cost: Of converting and refining.
        """
        if not math.isfinite(facts["loss"]):
            return
        if not (self.root / digest).exists():
            self.root.mkdir(parents=True, exist_ok=True)
            fresh = unused(self.root / digest)
            try:
                for part in _PARTS:
                    if (folder / part).is_dir():
                        shutil.copytree(folder / part, fresh / part, copy_function=_link)
                shutil.copy(folder / "plan.json", fresh / "plan.json")
                write_json(fresh / "record.json", {"facts": facts, "cost": cost})
                fresh.rename(self.root / digest)
            except OSError:  # no links here, or another process was first
                shutil.rmtree(fresh, ignore_errors=True)
                if not (self.root / digest).exists():
                    return
        self.name(key, digest, plan_cost)

    def name(self, key: str, digest: str, plan_cost: Mapping[str, float]) -> None:
        """Note the conversion that a candidate leads to."""
        write_json(
            self.root / "candidates" / f"{key}.json",
            {"conversion": digest, "plan_cost": plan_cost},
        )

    def remove_unneeded(self, keys: Collection[str]) -> None:
        """Remove the conversions of no candidate in `keys` whose weights no trial has any more."""
        needed = {
            named["conversion"] for key in keys if (named := self._of_candidate(key)) is not None
        }
        for record in self.root.glob("*/record.json"):
            folder = record.parent
            if folder.name not in needed:
                with contextlib.suppress(OSError):
                    if any(file.stat().st_nlink == 1 for file in folder.glob("*/*.safetensors")):
                        shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Remove the library."""
        shutil.rmtree(self.root, ignore_errors=True)

    # ---- one at a time ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def turn(self, key: str, *, wait: bool = True) -> Iterator[bool]:
        """Acquire the right to make the conversion of a candidate.

        It ends with the process. Where the file system has no locks, two processes may make the
        same conversion.

        Args:
            key: Of the candidate.
            wait: Whether to wait if another process makes it.

        Yields:
            Whether this process has the right.
        """
        with file_lock(self.root / "locks" / key, wait=wait) as locked:
            yield locked

    def _of_candidate(self, key: str) -> _CandidateConversion | None:
        file = self.root / "candidates" / f"{key}.json"
        return read_json(file) if file.is_file() else None


def conversion_note(
    candidate: Candidate, part: str, original: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the note that is stored with the weights of a trial's folder.

    Args:
        candidate: Of the trial.
        part: The folder: `converted` or `start`.
        original: Of `attention.io.checkpoint.original_note`.
    """
    if part == "start":
        return original
    return {"recipe": candidate.recipe.to_dict(), "seed": candidate.seed, **original}


def add_costs(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of two costs of `orchestrator.conversion.execution.cost`."""
    return {name: first[name] + second[name] for name in first}


def _put(source: Path, folder: Path, plan: AttentionPlan, note: Mapping[str, Any]) -> None:
    """Put a part of a conversion in place, with a separate note."""

    def write(fresh: Path) -> None:
        ignored = shutil.ignore_patterns(DIGESTS, checkpoint.PLAN_FILE)
        shutil.copytree(
            source, fresh, copy_function=_link_or_copy, ignore=ignored, dirs_exist_ok=True
        )
        checkpoint.write_note(fresh, plan, dict(note))

    checkpoint.write_atomically(folder, write)


def _link(source: str, target: str) -> None:
    """Link weights, and copy small files that may be rewritten later."""
    if source.endswith(".safetensors"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def _link_or_copy(source: str, target: str) -> None:
    try:
        _link(source, target)
    except OSError:
        shutil.copy2(source, target)
