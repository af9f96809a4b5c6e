"""A bad input: a command line, the preparation of the folder, and the expected message.

Commands run in the folder of `bad_input_folder`. `...` in one stands for small texts that are there, see `ELLIPSIS`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bad_input_folder import edit_json, edit_weights
from safetensors.torch import load_file, save_file

EVALUATED = "--eval-data texts/notes.txt --eval-tokens 64 --sequence-length 32"
ELLIPSIS = {
    "convert": f"--data texts/notes.txt --calibration-tokens 64 {EVALUATED}",
    "inspect": f"--data texts/notes.txt --calibration-tokens 64 {EVALUATED}",
    "evaluate": EVALUATED,
    "train": f"--train-data texts/notes.txt {EVALUATED}",
    "finetune": f"--train-data texts/notes.txt {EVALUATED}",
}


QUERY = "model.layers.0.self_attn.q_proj.weight"


@dataclass(frozen=True)
class Bad:
    """A bad input. `said`: text that the message must contain, in any case. `leaves`: a folder in which a command may
    leave finished files, e.g. token files that the next start uses."""

    what: str
    line: str
    said: tuple[str, ...]
    prepare: Callable[[Path], Any] | None = None
    code: int = 2
    leaves: str | None = None
    without_gpu: bool = False

    @property
    def verb(self) -> str:
        return self.line.partition(" ")[0]

    @property
    def arguments(self) -> list[str]:
        words = shlex.split(self.line)
        return [w for word in words for w in (ELLIPSIS[self.verb].split() if word == "..." else [word])]


def writes(name: str, content: str | bytes) -> Callable[[Path], Any]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def removes(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).unlink()


def renames(name: str, other: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).rename(folder / other)


def cuts(name: str, size: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def config(**changes: Any) -> Callable[[Path], Any]:
    """Keys of the model's config, changed; None takes one away."""
    return lambda folder: edit_json(folder / "model" / "config.json", **changes)


def weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    return lambda folder: edit_weights(folder / "model" / "model.safetensors", change)


def in_shards(folder: Path) -> None:
    """The model's weights in two files, the second one cut short, as after a broken download."""
    tensors = load_file(folder / "model" / "model.safetensors")
    (folder / "model" / "model.safetensors").unlink()
    places = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        part = {key: value for index, (key, value) in enumerate(sorted(tensors.items())) if index % 2 == number - 1}
        save_file(part, folder / "model" / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    cuts("model/model-00002-of-00002.safetensors", 20_000)(folder)
