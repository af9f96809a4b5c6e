"""How far a conversion layer by layer has come, on disk after each layer, so that a killed one goes on where it was.

Legend: N sequences of T tokens, D model dim.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from attention.base.timing import Phases
from attention.conversion.refinement.refine import FitWork
from attention.io.replacing import OutputError, entries
from attention.io.shards import shard_path, write_shard
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.conversion.one_layer import Layer
from orchestrator.storage.json_files import read_json, write_json

STATE, CURVES = "state.json", "curves.json"
OURS = re.compile(
    r"(state|curves)\.json|((streams|below|metric)-\d{5}|result/model-\d+-of-\d+)\.safetensors|result|"
    r"(\.(state|curves)\.json|(result/)?\.(streams|below|metric|model)-[\w-]*\.safetensors)\.[\d-]+\.new"
)


@dataclass
class Stage:
    """`folder` holds `state.json`, what a plan rests on, the streams that enter the next layer, and in `result` the
    shards of those done.

    `identity`: all that the result depends on; `layers`: what was found in each layer done; `seconds` by phase;
    `planned`: what the plan took.
    """

    folder: Path
    identity: dict[str, Any]
    layers: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    note: str = ""
    planned: list[FitWork] = field(default_factory=list)
    finishing: bool = False

    @classmethod
    def open(cls, folder: Path, identity: dict[str, Any], overwrite: bool = False) -> Stage:
        """What an earlier run of this very conversion has left, or a fresh start; `note` says which, if it matters.

        Raises OutputError if finished layers of another conversion lie there, unless `overwrite` gives them up.
        """
        identity, note, known = json.loads(json.dumps(identity)), "", check_stage(folder)
        if known:
            stage = cls(folder, identity, known["layers"], known["seconds"])
            goes_on = stage._streams().is_file() if stage.reached else stage.is_planning
            if known["identity"] == identity and goes_on:
                after = f"after layer {stage.reached}" if stage.reached else "with the plan"
                stage.note = f"going on {after} of an earlier run in {folder}"
                return stage
            if stage.reached and not overwrite:
                raise OutputError(
                    f"out: {folder} holds {stage.reached} finished layers of another conversion; its command goes on "
                    "with them; to give them up add --overwrite (in Python: overwrite=True), or give another folder"
                )
            note = f"{folder} holds another conversion; starting over" if stage.reached else ""
        shutil.rmtree(folder, ignore_errors=True)
        stage = cls(folder, identity, note=note)
        folder.mkdir()
        stage._write()
        stage.result.mkdir()
        return stage

    @property
    def result(self) -> Path:
        """The checkpoint that is being written."""
        return self.folder / "result"

    @property
    def reached(self) -> int:
        """Layers that are done."""
        return len(self.layers)

    @property
    def is_planning(self) -> bool:
        """Whether something of a plan is kept (`orchestrator.conversion.disk_planning`)."""
        return (self.folder / CURVES).is_file() or any(self.folder.glob("metric-*.safetensors"))

    def spent(self, phases: Phases) -> None:
        """Keep the seconds so far."""
        self.seconds = dict(phases)
        self._write()

    def _streams(self) -> Path:
        return self.folder / f"streams-{self.reached:05d}.safetensors"

    def streams(self) -> tuple[Tensor, Tensor]:
        """`[N, T, D]` twice: what enters the next layer in the original and in the converted model."""
        streams = load_file(self._streams())
        return streams["original"], streams["converted"]

    def keep(self, done: Layer, original: Tensor, converted: Tensor, layers: int, phases: Phases) -> None:
        """Keep a finished layer, of `layers` in all, and the streams that leave it: done, or after a kill not begun."""
        write_shard(shard_path(self.result, self.reached + 1, layers), done.tensors)
        before = self._streams()
        self.layers.append(done.facts())
        write_shard(self._streams(), {"original": original, "converted": converted})
        self.spent(phases)
        before.unlink(missing_ok=True)

    def finish(self) -> None:
        """Note that from now on `result` gets what is not a layer."""
        self.finishing = True
        self._write()

    def leave(self) -> str:
        """Go away if no layer is done. Returns what is left, in words."""
        layers = len((check_stage(self.folder) or {}).get("layers", ()))
        if not layers and self.is_planning:
            return f"what the plan rests on is kept in {self.folder}; the same command goes on with it"
        if not layers:
            shutil.rmtree(self.folder, ignore_errors=True)
            return "nothing was written"
        return f"{layers} finished layer(s) are kept in {self.folder}; the same command goes on after them"

    def _write(self) -> None:
        record = {"identity": self.identity, "layers": self.layers, "seconds": self.seconds}
        write_json(self.folder / STATE, record | {"finishing": self.finishing})

    def plan(self, head_dim: int) -> AttentionPlan:
        """The plan of the layers that are done."""
        layers = (LayerPlan(tuple(item["key_map"]), tuple(item["value_map"])) for item in self.layers)
        return AttentionPlan(tuple(layers), head_dim)


def check_stage(folder: Path) -> dict[str, Any] | None:
    """The state of what an earlier run has left in `folder`; None if it has left nothing.

    Raises OutputError if anything there is not of a conversion layer by layer.
    """
    if not os.path.lexists(folder):
        return None
    known: dict[str, Any] = {}
    with contextlib.suppress(ValueError, OSError):
        known = read_json(folder / STATE)
    ours = {"identity", "layers", "seconds"} <= known.keys()
    for name, mode in entries(folder) if folder.is_dir() and not folder.is_symlink() else [("", 0)]:
        if stat.S_ISDIR(mode):
            fits = name == "result"
        else:
            within = ours and bool(OURS.fullmatch(name) or (known.get("finishing") and name.startswith("result/")))
            fits = stat.S_ISREG(mode) and within
        if not fits:
            raise OutputError(
                f"out: {str(folder / name)!r} is in the way: a conversion layer by layer is kept there until it is "
                "complete; move it, or give another folder"
            )
    return known if ours else None
