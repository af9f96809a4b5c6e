"""The folder of a conversion layer by layer, from which a killed one resumes.

Legend: N sequences of T tokens, D model dim.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from safetensors.torch import load_file
from torch import Tensor

from attention.base.timing import Phases
from attention.conversion.refinement.refine import FitWork
from attention.io.replacing import OutputError, entries
from attention.io.shards import shard_path, write_shard
from attention.plan import AttentionPlan, layer_of_record
from orchestrator.conversion.record import FitRecord
from orchestrator.storage.json_files import read_json, write_json

STATE, CURVES = "state.json", "curves.json"
OURS = re.compile(
    r"(state|curves)\.json|result|"
    r"((streams|below|above|metric)-\d{5}|result/model-\d+-of-\d+)\.safetensors|"
    r"(\.(state|curves)\.json|(result/)?\.(streams|below|above|metric|model)-[\w-]*\.safetensors)"
    r"\.[\d-]+\.new"
)


_MAPS = ("key_map", "value_map", "key_width", "value_width")


class LayerRecord(TypedDict):
    """A finished layer: its plan, the fits of its refinement, its cache after one sequence."""

    key_map: list[int]
    value_map: list[int]
    key_width: NotRequired[int]
    value_width: NotRequired[int]
    fits: list[FitRecord]
    cache_bytes: int


class FolderState(TypedDict):
    """The JSON of `state.json`."""

    identity: Mapping[str, Any]
    layers: list[LayerRecord]
    seconds: dict[str, float]
    finishing: bool


class StreamPair(NamedTuple):
    """Hidden states `[N, T, D]` of all sequences in the original and in the converted model."""

    original: Tensor
    converted: Tensor


@dataclass
class LayerFolder:
    """Finished layers, the streams that enter the next one, and what the plan rests on.

    Attributes:
        folder: Holds `state.json`, the streams, and in `result` the shards of the finished layers.
        identity: All that the result depends on.
        layers: The finished layers.
        seconds: By phase.
        note: Whether an earlier run is continued or given up, in words.
        finishing: Whether `result` gets what is not a layer.
    """

    folder: Path
    identity: Mapping[str, Any]
    layers: list[LayerRecord] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    note: str = ""
    finishing: bool = False

    @classmethod
    def open(
        cls, folder: Path, identity: Mapping[str, Any], overwrite: bool = False
    ) -> LayerFolder:
        """Open what an earlier run of this very conversion has left, or start afresh.

        Raises:
            OutputError: If finished layers of another conversion are there, unless `overwrite`
                gives them up.
        """
        identity = json.loads(json.dumps(identity))
        note = ""
        if state := check_layer_folder(folder):
            opened = cls(folder, identity, state["layers"], state["seconds"])
            resumes = opened._streams().is_file() if opened.reached else opened.is_planning
            if state["identity"] == identity and resumes:
                after = f"after layer {opened.reached}" if opened.reached else "with the plan"
                opened.note = f"going on {after} of an earlier run in {folder}"
                return opened
            if opened.reached and not overwrite:
                raise OutputError(
                    f"out: {folder} holds {opened.reached} finished layers of another conversion; "
                    "its command continues with them; to give them up add --overwrite (in Python: "
                    "overwrite=True), or give another folder"
                )
            if opened.reached:
                note = f"{folder} holds another conversion; starting over"
        shutil.rmtree(folder, ignore_errors=True)
        fresh = cls(folder, identity, note=note)
        folder.mkdir()
        fresh._write()
        fresh.result.mkdir()
        return fresh

    @property
    def result(self) -> Path:
        """The checkpoint that is being written."""
        return self.folder / "result"

    @property
    def reached(self) -> int:
        """Number of finished layers."""
        return len(self.layers)

    @property
    def is_planning(self) -> bool:
        """Whether parts of a plan exist (`orchestrator.conversion.disk_planning`)."""
        names = {file.name.partition("-")[0] for file in self.folder.glob("*-*.safetensors")}
        return (self.folder / CURVES).is_file() or bool(names & {"below", "above", "metric"})

    @property
    def work(self) -> list[FitWork]:
        """The work of the fits of the finished layers."""
        return [FitWork(**fit["work"]) for layer in self.layers for fit in layer["fits"]]

    def save_seconds(self, phases: Phases) -> None:
        """Write the elapsed seconds."""
        self.seconds = dict(phases)
        self._write()

    def _streams(self) -> Path:
        return self.folder / f"streams-{self.reached:05d}.safetensors"

    def streams(self) -> StreamPair:
        """Return what enters the next layer."""
        streams = load_file(self._streams())
        return StreamPair(streams["original"], streams["converted"])

    def add(
        self,
        record: LayerRecord,
        tensors: Mapping[str, Tensor],
        streams: StreamPair,
        layers: int,
        phases: Phases,
    ) -> None:
        """Add a finished layer, of `layers` in all: all of it, or after a kill nothing.

        Args:
            record: What became of it.
            tensors: Its weights by their names in the whole model.
            streams: What leaves it.
            layers: Number of layers of the model.
            phases: Elapsed seconds.
        """
        write_shard(shard_path(self.result, self.reached + 1, layers), tensors)
        before = self._streams()
        self.layers.append(record)
        write_shard(self._streams(), streams._asdict())
        self.save_seconds(phases)
        before.unlink(missing_ok=True)

    def finish(self) -> None:
        """Note that from now on `result` gets what is not a layer."""
        self.finishing = True
        self._write()

    def leave(self) -> str:
        """Remove the folder if it has neither a finished layer nor a plan.

        Returns:
            The state of the folder, in words.
        """
        state = check_layer_folder(self.folder)
        layers = len(state["layers"]) if state else 0
        if not layers and self.is_planning:
            return f"what the plan rests on is kept in {self.folder}; the same command continues it"
        if not layers:
            shutil.rmtree(self.folder, ignore_errors=True)
            return "nothing was written"
        return (
            f"{layers} finished layer(s) are kept in {self.folder}; the same command continues "
            "after them"
        )

    def _write(self) -> None:
        state: FolderState = {
            "identity": self.identity,
            "layers": self.layers,
            "seconds": self.seconds,
            "finishing": self.finishing,
        }
        write_json(self.folder / STATE, state)

    def plan(self, head_dim: int) -> AttentionPlan:
        """Return the plan of the finished layers."""
        records = (
            {name: value for name, value in layer.items() if name in _MAPS} for layer in self.layers
        )
        layers = (layer_of_record(number, record) for number, record in enumerate(records))
        return AttentionPlan(tuple(layers), head_dim)


def check_layer_folder(folder: Path) -> FolderState | None:
    """Return the state that an earlier run has left in `folder`; None if there is none.

    Raises:
        OutputError: If anything there is not of a conversion layer by layer.
    """
    if not os.path.lexists(folder):
        return None
    state: Any = {}
    with contextlib.suppress(ValueError, OSError):
        state = read_json(folder / STATE)
    ours = {"identity", "layers", "seconds"} <= state.keys()
    contents = entries(folder) if folder.is_dir() and not folder.is_symlink() else [("", 0)]
    for name, mode in contents:
        if stat.S_ISDIR(mode):
            fits = name == "result"
        else:
            finishing = state.get("finishing") and name.startswith("result/")
            named = ours and bool(OURS.fullmatch(name) or finishing)
            fits = stat.S_ISREG(mode) and named
        if not fits:
            raise OutputError(
                f"out: {str(folder / name)!r} is in the way: a conversion layer by layer is kept "
                "there until it is complete; move it, or give another folder"
            )
    return state if ours else None
