"""DeepSpeed's ZeRO 3 around a model.

Built and read without any worker holding it whole, gathered a tensor at a time.

DeepSpeed compiles C++ operators at first use by default; the one for communication has an
equivalent in torch, which is used instead, so that no compiler is needed and no killed compile can
leave a lock behind.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import torch

if not torch.accelerator.is_available():
    # Spares the search for others, and a warning that it failed.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.ops
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, real_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import logger as deepspeed_logger
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from attention.base.environment import environment_variable
from attention.base.messages import reason
from attention.io import checkpoint, piecewise
from attention.io.layers.windows import LazyWeights
from attention.io.precision import DTYPES
from attention.modeling.predictions import agree_on_chunk_memory, chunk_memory
from trainers.deepspeed_config import config_of
from trainers.out_of_memory import free_memory
from trainers.settings import TrainSettings

# DeepSpeed calls two collectives by deprecated names of torch, once per parameter with ZeRO 3
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
deepspeed_logger.setLevel(logging.ERROR)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
_torch_linear = functional.linear


def check_deepspeed(settings: TrainSettings) -> None:
    """Raise ValueError for what DeepSpeed itself refuses of `train.deepspeed`.

    Unknown keys and values of sections, and what torch's Adam does not take.
    """
    try:
        config = config_of(settings)
        adam = config["optimizer"]["params"]
        if adam["torch_adam"] and "bias_correction" in adam:
            raise ValueError(
                "optimizer.params.bias_correction is not of torch's Adam; set "
                "optimizer.params.torch_adam=false too, or leave it out"
            )
        DeepSpeedConfig(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"train.deepspeed: {key}: got {first['input']!r}; {first['msg']}"
        ) from None
    except (
        Exception
    ) as error:  # its own errors, assertions, and any error caused by a value of the wrong type
        raise ValueError(f"train.deepspeed: {reason(error)}") from None


@contextmanager
def computing_on(device: torch.device | str) -> Iterator[None]:
    """Make DeepSpeed compute on a device while the body runs.

    It takes a GPU by itself wherever there is one.
    """
    chosen = torch.device(device)
    before = real_accelerator.ds_accelerator
    with (
        environment_variable("DS_ACCELERATOR", chosen.type),
        environment_variable("LOCAL_RANK", str(chosen.index or 0)),
    ):
        real_accelerator.ds_accelerator = None  # it looks once [0.19]
        try:
            yield
        finally:
            real_accelerator.ds_accelerator = before


def group_of_one() -> None:
    """Make a process group of this process alone, unless there is one."""
    if not dist.is_initialized():
        accelerator: Any = get_accelerator()
        backend = "nccl" if accelerator.device_name() == "cuda" else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - public in torch's documentation
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires it even where a group exists


def initialize(
    model: nn.Module, config: dict[str, Any], groups: list[dict[str, Any]] | None = None
) -> Any:
    """Return DeepSpeed's engine of a model.

    A model that is not trained has no groups of parameters; that takes ZeRO 3.
    """
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]  # pyright: ignore[reportArgumentType]
    _mend_linear()
    return engine


def _mend_linear() -> None:
    """Replace ZeRO 3's linear function, which replaces torch's, for good [0.19]."""
    if functional.linear is zero3_linear_wrap:
        functional.linear = _linear


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return torch's linear function, by DeepSpeed's of little memory where the weight is split.

    DeepSpeed's adds the bias in place. Selective activation checkpointing, which has kept the
    product, would take it from there with the bias in it, and add it a second time.
    """
    if not hasattr(weight, "ds_id"):
        return _torch_linear(input, weight, bias)
    product = zero3_linear_wrap(input, weight)
    return product if bias is None else product + bias


def agree_on_chunks(device: torch.device) -> None:
    """Make all workers compute logits of as many positions at once, whatever GPUs they have.

    They must call a head that ZeRO 3 has split equally often. All call this together.
    """
    if dist.get_world_size() > 1:
        least = torch.tensor([chunk_memory(device)], dtype=torch.int64, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        agree_on_chunk_memory(device, int(least.item()))


def load_trainable(folder: str | Path, settings: TrainSettings) -> PreTrainedModel:
    """Load a checkpoint as an engine with these settings takes it.

    With ZeRO 3 it is split over the workers, who call together.
    """
    if settings.zero_stage < 3:
        return checkpoint.load(folder, DTYPES[settings.dtype])
    group_of_one()
    accelerator: Any = get_accelerator()
    deepspeed.init_distributed(accelerator.communication_backend_name())  # which counts the workers
    model, weights = piecewise.outline(folder, DTYPES[settings.dtype])
    _fill(model, weights, config_of(settings), accelerator.current_device_name())
    return model


def _fill(
    model: PreTrainedModel, weights: LazyWeights, config: Mapping[str, Any], device: str
) -> None:
    """Read a model's parameters, those of one module at a time.

    Rank 0 does, and each worker keeps its part.
    """
    # A tied one once, and alive, so that no identity is given away.
    outlines = dict(model.named_parameters())
    names = {id(outline): name for name, outline in outlines.items()}
    parameters: dict[int, nn.Parameter] = {}
    # Children before parents, whose parameters include theirs.
    for module in reversed(list(model.modules())):
        for name, outline in list(module.named_parameters(recurse=False)):
            if id(outline) not in parameters:
                whole = torch.empty(outline.shape, dtype=outline.dtype)
                if dist.get_rank() == 0:
                    weights.read_into({names[id(outline)]: whole})
                parameters[id(outline)] = nn.Parameter(whole)
            setattr(module, name, parameters[id(outline)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
        if next(module.parameters(recurse=False), None) is not None:
            deepspeed.zero.Init(module=module, config_dict_or_path=dict(config), dtype=model.dtype)
    _mend_linear()


@contextmanager
def gathered_parameters(tensors: Sequence[Tensor]) -> Iterator[None]:
    """While the body runs, parameters that ZeRO 3 has split are whole.

    All workers must do it together.
    """
    split = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    with deepspeed.zero.GatheredParameters(split) if split else nullcontext():
        yield


def write_universal(source: Path, target: Path) -> None:
    """Write a training checkpoint of ZeRO 1 to 3 in DeepSpeed's universal form.

    It has a file per parameter.
    """
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(target.parent, ignore_errors=True)
    target.mkdir(parents=True)
    settings = argparse.Namespace(input_folder=str(source), output_folder=str(target), strict=True)
    settings.num_extract_workers = settings.num_merge_workers = _at_once(source)
    settings.keep_temp_folder = False
    settings.inject_missing_state = True  # of tensor parallelism, which there is none of
    module: Any = ds_to_universal
    processes = module.ProcessPoolExecutor
    # Threads: processes would be forks of one that has a GPU and threads [0.19]
    module.ProcessPoolExecutor = ThreadPoolExecutor
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            ds_to_universal.main(settings)
    finally:
        module.ProcessPoolExecutor = processes


def _at_once(source: Path) -> int:
    """Return how many old shares are read at a time: as the CPUs and half of the memory allow."""
    largest = max((file.stat().st_size for file in source.rglob("*.pt")), default=0)
    in_memory = int(psutil.virtual_memory().available / 2 / max(1, largest))
    return max(1, min(len(os.sched_getaffinity(0)), in_memory))


def restore_counts(optimizer: torch.optim.Optimizer) -> None:
    """Give each part of the weights its own count of steps, after a checkpoint was read.

    With ZeRO 3 in the universal form they share one, which each of them then increments, and it is
    a number or in the host's memory, where a fused Adam does not accept it [0.19].
    """
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if step is not None and fused:
            step = torch.as_tensor(step, dtype=torch.float32, device=parameter.device)
        if isinstance(step, Tensor):
            state["step"] = step.clone()


class EngineOwner:
    """An object with an engine of DeepSpeed, `_engine`, and the only one that refers to it."""

    _engine: Any = None

    def close(self) -> None:
        """Give the memory of the engine back."""
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        _release(engine)
        del engine  # or `free_memory` would find it in use
        free_memory()


class SplitModel(EngineOwner):
    """A model of which every worker holds its part and that is not trained.

    A teacher with ZeRO 3.
    """

    def __init__(self, folder: str | Path, settings: TrainSettings) -> None:
        model = load_trainable(folder, settings).requires_grad_(False)
        config = {key: value for key, value in config_of(settings).items() if key != "optimizer"}
        self._engine = initialize(model, config)
        self._engine.eval()

    @property
    def model(self) -> nn.Module:
        """All workers must run each forward pass together."""
        return self._engine.module


def _release(engine: Any) -> None:
    """Remove what leads to an engine and its optimiser from its model, which may live on [0.19]."""
    model = engine.module
    _forget(model)
    engine.destroy()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    for parameter in model.parameters():
        for name in ("_zero_optimizer", "_z3_optimizer", "_hp_mapping"):
            vars(parameter).pop(name, None)


def _forget(model: nn.Module) -> None:
    """Let go of a model that ZeRO 3 had.

    A list of modules, and the memory of a method, keep every one [0.19].
    """
    modules = set(model.modules())
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module not in modules]
    name = "_PartitionedParameterCoordinator__params_to_release"
    method: Any = getattr(PartitionedParameterCoordinator, name, None)
    # It is wrapped in a function that counts time.
    for cell in getattr(method, "__closure__", None) or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
