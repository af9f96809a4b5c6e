"""The verb `init`: a first configuration for a checkpoint of one's own."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.config import options


def init(
    model: Annotated[
        str, typer.Argument(help="Folder with config.json, a GGUF file, or hub name; no weights are read.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The YAML file (default: the model's name in this folder); - prints it.")
    ] = None,
    data: Annotated[
        str, typer.Option(help="Text to train and measure on: files, a folder, a hub name, stdlib or builtin.")
    ] = "builtin",
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of the machine or node that it will run on (default: those here).")
    ] = None,
    gpu_memory: Annotated[
        int | None, typer.Option(min=1, help="GiB of memory of each (default: of those here; 80 where there is none).")
    ] = None,
    dequantize: options.Dequantize = False,
    storage: Annotated[
        str, typer.Option(help="Where searches are to write; what is written fits the free space there if it can.")
    ] = "runs",
) -> None:
    """Write a first configuration for a checkpoint, and a smoke test of it. Both are commented; `headfold search FILE
    --dry-run` checks one. What does not fit the free disk is made smaller, or said."""
    from orchestrator import checkpoints
    from orchestrator.config.first import FirstConfig, Place
    from orchestrator.config.parsing import ConfigError, read_yaml
    from orchestrator.config.schema import parse_config
    from orchestrator.resources.size import Size
    from orchestrator.search.estimate import disk_shortage
    from orchestrator.search.validation import open_models
    from orchestrator.storage.shipped import shipped

    folder = checkpoints.resolve_model(model, dequantize=dequantize, weights=False)
    opened = checkpoints.open_checkpoint(folder, weights=False)
    checkpoints.check_own_cache(opened, "model")
    here, held = _gpus_here()
    place = Place(here if gpus is None else gpus, gpu_memory * 2**30 if gpu_memory else held, os.cpu_count() or 1)
    schema, dtype = str(shipped("docs/config.schema.json")), checkpoints.written_dtype(opened)
    size = Size.of(opened.config).total
    first = FirstConfig(model, opened.geometry, dtype, size, data, place, schema, dequantize, storage)

    def shortage_of(first: FirstConfig) -> str | None:
        whole = parse_config(read_yaml(first.text()), where="the new configuration")
        return disk_shortage(open_models(whole, weights=False))

    if shortage := shortage_of(first):
        first = replace(first, small=True)
        shortage = shortage_of(first)
    text = first.text()
    if str(out) == "-":
        print(text, end="")
        return
    file = out or Path(f"{first.name}.yaml")
    brief = file.with_stem(f"{file.stem}-smoke")
    for path in (file, brief):
        if path.exists():
            raise ConfigError(f"out: {str(path)!r} exists; name another file with --out, or remove it")
    for path, content in ((file, text), (brief, replace(first, smoke=True).text())):
        try:
            with path.open("x", encoding="utf-8") as stream:
                stream.write(content)
        except OSError as error:
            raise ConfigError(f"out: cannot write to {str(path)!r} ({error.strerror}); name another file") from None
    if shortage:
        print(f"warning: {shortage}", file=sys.stderr)
    print(f"wrote {file} and {brief}; next: headfold search {brief} --dry-run")


def _gpus_here() -> tuple[int, int]:
    """GPUs of this machine, and bytes of memory of the smallest; 80 GiB where there is none to ask."""
    import torch

    count = torch.cuda.device_count()
    sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(count)]
    return count, min(sizes, default=80 * 2**30)
