"""`headfold init`: a first configuration for your checkpoint, and a smoke test of it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attention.base.products import multiplies_bfloat16
from attention.base.text import gib
from attention.checkpoint import Checkpoint
from orchestrator import checkpoints
from orchestrator.config.compared import ComparisonConfig, compared_recipes
from orchestrator.config.first import FirstConfig, Hardware
from orchestrator.config.options import InitOptions
from orchestrator.config.parsing import ConfigError, read_yaml
from orchestrator.config.schema import parse_config
from orchestrator.resources.memory import available_bytes
from orchestrator.resources.processes import TRAINING_WORKER, Needs
from orchestrator.resources.size import SPARE, Size
from orchestrator.search.estimate import local_parallel, storage_of
from orchestrator.search.setup import SearchSetup
from orchestrator.storage.shipped import shipped


def init(options: InitOptions) -> None:
    """Write the two files, or print the first.

    Raises:
        ConfigError: For a checkpoint that has nothing to convert, and for files that exist or
            cannot be written.
    """
    first, shortages = _first_config(options)
    for shortage in shortages:
        print(f"warning: {shortage}", file=sys.stderr)
    if str(options.out) == "-":
        print(first.text(), end="")
        return
    file = options.out or Path(f"{first.name}.yaml")
    brief = file.with_stem(f"{file.stem}-smoke")
    for path in (file, brief):
        if path.exists():
            raise ConfigError(
                f"out: {str(path)!r} exists; name another file with --out, or remove it"
            )
    for path, content in ((file, first.text()), (brief, replace(first, smoke=True).text())):
        try:
            with path.open("x", encoding="utf-8") as stream:
                stream.write(content)
        except OSError as error:
            raise ConfigError(
                f"out: cannot write to {str(path)!r} ({error.strerror}); name another file"
            ) from None
    print(f"wrote {file} and {brief}; next: headfold search {brief} --dry-run")


def _first_config(options: InitOptions) -> tuple[FirstConfig, list[str]]:
    """Return the first configuration, adapted to this machine, and what it still lacks."""
    opened = checkpoints.open_model(
        options.model, "model", dequantize=options.dequantize, weights=False
    )
    checkpoints.check_own_cache(opened, "model")
    gpus, memory = _gpus_here()
    kind = FirstConfig
    if options.compare is not None:
        kind = partial(ComparisonConfig, recipes=compared_recipes(options.compare))
    first = kind(
        model=options.model,
        geometry=opened.geometry,
        dtype=checkpoints.written_dtype(opened),
        parameters=Size.of(opened.config).total,
        source=options.data,
        hardware=Hardware(
            gpus=gpus if options.gpus is None else options.gpus,
            gpu_bytes=options.gpu_memory * 2**30 if options.gpu_memory else memory,
            cpus=os.cpu_count() or 1,
            cpu_bfloat16=multiplies_bfloat16(),
        ),
        schema=str(shipped("docs/config.schema.json")),
        dequantize=options.dequantize,
        storage=options.storage,
    )
    memory, disk = _shortages(first, opened)
    if memory or disk:
        first = replace(first, little_memory=memory is not None, small=disk is not None)
        memory, disk = _shortages(first, opened)
    return first, list(filter(None, (memory, disk)))


def _shortages(first: FirstConfig, opened: Checkpoint) -> tuple[str | None, str | None]:
    """Return what a search lacks of memory, and of disk for one trial at a time, if anything."""
    config = parse_config(read_yaml(first.text()), where="the new configuration")
    model = config.model.with_folders(path=opened.path)
    setup = SearchSetup(config.model_copy(update={"model": model}), opened)
    memory = None if first.hardware.gpus else _lacks_memory(setup)
    return memory, storage_of(setup).shortage(1)


def _lacks_memory(setup: SearchSetup) -> str | None:
    """Return the memory that a search on this machine's CPUs lacks; None if it fits."""
    needs = Needs(setup.inputs, "pooled")
    worker = needs.memory_of_workers(TRAINING_WORKER)
    trial = needs.planning().total + max(
        worker.need(TRAINING_WORKER, each).total
        for each in setup.inputs.trainings(needs.resolved(TRAINING_WORKER, setup.config.train))
    )
    taken, there = local_parallel(setup.config) * trial, available_bytes()
    if taken <= SPARE * there:
        return None
    return f"the search takes about {gib(taken)} of memory, and {gib(there)} are available"


def _gpus_here() -> tuple[int, int]:
    """Return the GPUs of this machine, and the bytes of memory of the smallest; else 80 GiB."""
    count = torch.cuda.device_count()
    cuda: Any = torch.cuda
    devices: list[Any] = [cuda.get_device_properties(number) for number in range(count)]
    sizes: list[int] = [device.total_memory for device in devices]
    return count, min(sizes, default=80 * 2**30)
