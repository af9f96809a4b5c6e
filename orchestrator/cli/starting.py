"""The verb `init`: a first configuration for a checkpoint of one's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli import options


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
) -> None:
    """Write a first configuration for a checkpoint. Commented; `headfold search FILE --dry-run` checks it."""
    from orchestrator.config.first import FirstConfig, Place
    from orchestrator.config.parsing import ConfigError, read_yaml
    from orchestrator.config.schema import parse_config
    from orchestrator.conversion import loading
    from orchestrator.conversion.estimates.sizes import Size
    from orchestrator.storage.shipped import shipped

    opened = loading.resolve_model(model, dequantize=dequantize, weights=False)
    geometry = loading.geometry_of(opened, key="model", weights=False)
    config = loading.checkpoint.load_config(opened)
    loading.check_own_cache(config, geometry, model, "model")
    here, held = _gpus_here()
    place = Place(here if gpus is None else gpus, gpu_memory * 2**30 if gpu_memory else held, os.cpu_count() or 1)
    schema, dtype = str(shipped("docs/config.schema.json")), loading.written_dtype(opened)
    first = FirstConfig(model, geometry, dtype, Size.of(config).total, data, place, schema, dequantize)
    text = first.text()
    parse_config(read_yaml(text), where="the new configuration")
    if str(out) == "-":
        print(text, end="")
        return
    file = out or Path(f"{first.name}.yaml")
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"out: {str(file)!r} exists; name another file with --out, or remove it") from None
    except OSError as error:
        raise ConfigError(f"out: cannot write to {str(file)!r} ({error.strerror}); name another file") from None
    print(f"wrote {file}; next: headfold search {file} --dry-run")


def _gpus_here() -> tuple[int, int]:
    """GPUs of this machine, and bytes of memory of the smallest; 80 GiB where there is none to ask."""
    import torch

    count = torch.cuda.device_count()
    sizes = [torch.cuda.get_device_properties(number).total_memory for number in range(count)]
    return count, min(sizes, default=80 * 2**30)
