"""How far a streamed conversion has come, on disk after each layer, so that a killed one goes on where it was.

Legend: N sequences of T tokens, D model dim.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from attention.plan import AttentionPlan, LayerPlan
from attention.shards import shard_path, write_shard
from orchestrator.layerwise import Layer
from orchestrator.models import Phases
from orchestrator.results import read_json, write_json

STATE = "state.json"


@dataclass
class Stage:
    """`folder` holds `state.json`, the streams that enter the next layer, and in `result` the shards of those done.

    `identity`: all that the result depends on; `layers`: what was found in each layer done; `seconds` by phase.
    """

    folder: Path
    identity: dict[str, Any]
    layers: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def open(cls, folder: Path, identity: dict[str, Any]) -> Stage:
        """What an earlier run of this very conversion has left, or a fresh start; `note` says which, if it matters."""
        identity, note = json.loads(json.dumps(identity)), ""
        if (folder / STATE).is_file():
            known = read_json(folder / STATE)
            stage = cls(folder, identity, known["layers"], known["seconds"])
            if known["identity"] == identity and stage._streams().is_file():
                stage.note = f"going on after layer {stage.reached} of an earlier run in {folder}"
                return stage
            note = f"{folder} holds another conversion; starting over"
        shutil.rmtree(folder, ignore_errors=True)
        stage = cls(folder, identity, note=note)
        stage.result.mkdir(parents=True)
        return stage

    @property
    def result(self) -> Path:
        """The checkpoint that is being written."""
        return self.folder / "result"

    @property
    def reached(self) -> int:
        """Layers that are done."""
        return len(self.layers)

    def _streams(self) -> Path:
        return self.folder / f"streams-{self.reached:05d}.safetensors"

    def streams(self) -> tuple[Tensor, Tensor]:
        """`[N, T, D]` twice: what enters the next layer in the original and in the converted model."""
        found = load_file(self._streams())
        return found["original"], found["converted"]

    def keep(self, done: Layer, original: Tensor, converted: Tensor, layers: int, phases: Phases) -> None:
        """Put a finished layer, of `layers` in all, and the streams that leave it on disk.

        A kill at any point leaves this layer done, or not begun.
        """
        write_shard(shard_path(self.result, self.reached + 1, layers), done.tensors)
        before = self._streams()
        self.layers.append(done.facts())
        write_shard(self._streams(), {"original": original, "converted": converted})
        self.seconds = dict(phases)
        record = {"identity": self.identity, "layers": self.layers, "seconds": self.seconds}
        write_json(self.folder / STATE, record)
        before.unlink(missing_ok=True)

    def plan(self, head_dim: int) -> AttentionPlan:
        """The plan of the layers that are done."""
        found = (LayerPlan(tuple(item["key_map"]), tuple(item["value_map"])) for item in self.layers)
        return AttentionPlan(tuple(found), head_dim)
