"""The parts of `make gpu`: each takes less than ten minutes on an H100 and yields its numbers one by one.

Legend: H query heads, G KV heads, d head dim, D model dim, L layers, T tokens per sequence, V vocabulary, N parameters.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from attention.base.memory import memory_peak
from attention.conversion.convert import build, convert
from attention.io import checkpoint
from attention.modeling import kernels
from attention.modeling.decoding import HeadMaps, decode
from attention.modeling.predictions import Final, final, in_chunks
from attention.plan import AttentionPlan, LayerPlan
from benchmarks.decode import RIVALS, layer_arms, of_whole_models
from benchmarks.gpu.devices import Device
from benchmarks.models import DEMO, LLAMA_7B, random_model
from benchmarks.needs.memory import random_checkpoint
from benchmarks.needs.real_width import COMMON, NARROW, SHAPES
from benchmarks.report import Scale, medians
from orchestrator.config.options import ConvertOptions
from orchestrator.conversion.disk_store import DiskStore
from orchestrator.serving.engine import EngineError
from orchestrator.serving.engines import engine
from orchestrator.serving.speed import engine_speed
from orchestrator.tasks.convert import Convert
from trainers.engine import TrainEngine
from trainers.losses import kl, language_modelling, objective
from trainers.settings import TrainSettings
from trainers.zero import group_of_one, load_trainable

GIGA = 2.0**30
DECOUPLED = LayerPlan((0, 1, 0, 2, 2, 2), (0, 0, 1, 1, 0, 1))
WIDE = replace(DECOUPLED, key_width=2, value_width=2)
ROOT = Path(__file__).resolve().parents[2]
LLAMA_3: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


class Skipped(Exception):
    """A part that cannot be run here, and why."""


@dataclass(frozen=True)
class Number:
    """A measurement."""

    name: str
    value: float
    unit: str
    note: str = ""


# ---- the decode kernel -------------------------------------------------------------------------------------------


@torch.no_grad()
def kernel(device: Device) -> Iterator[Number]:
    """The fused decode kernel against its reference, largest difference; wrong ones end the part."""
    wrong = []
    fused = device.name == "cuda" and kernels.available()
    if device.name == "cuda" and not fused:
        raise Skipped("Triton cannot be imported, or HEADFOLD_TRITON=0")

    def batched(plan: LayerPlan) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """Return the reference where there is no kernel."""
        maps = HeadMaps.of(plan)
        return None if fused else lambda query, key, value: decode(query, key, value, maps, None, None)

    dtypes = device.pick([torch.float32], list(kernels.TOLERANCE))
    shapes = device.pick(
        [(8, DECOUPLED), (8, WIDE)], [(width, plan) for width in (32, 64, 80, 128) for plan in (DECOUPLED, WIDE)]
    )
    for dtype in dtypes:
        for width, plan in shapes:
            apart = 0.0
            for tokens in device.pick([1, 9], [1, 65, 4097, 32_768]):
                one = kernels.difference(plan, width, tokens, device.torch_device, dtype, attend=batched(plan))
                apart = max(apart, one)
            name = f"{str(dtype).removeprefix('torch.')}, head dim {width}"
            name += f", heads {plan.key_width} times as wide" if plan.is_wide else ""
            limit = kernels.TOLERANCE[dtype]
            yield Number(
                name, apart, "", f"at most {limit:g}" + ("" if fused else "; batched products, no kernel here")
            )
            if not apart <= limit:
                wrong.append(f"{name}: {apart:.3g}, and {limit:g} is the limit")
    if wrong:
        raise RuntimeError(f"it differs from the reference: {'; '.join(wrong)}")


@torch.no_grad()
def decode_speed(device: Device) -> Iterator[Number]:
    """Time one new token in one layer, a quarter of the KV heads, keys and values apart: ours, and its rivals."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # it compiles anew for every length: 40 ms a token on an H100
    shapes = device.pick({"demo": DEMO}, {"32 heads of 128": LLAMA_7B})
    for shape_name, shape in shapes.items():
        heads, width = shape["num_attention_heads"], shape["head_dim"]
        for length in device.pick([16], [1024, 4096, 16_384, 65_536]):
            arms = layer_arms(heads, width, length, device.dtype, str(device.torch_device))
            repeat: dict[str, int] = {name: device.pick(1, 20) for name in arms}
            times = medians(arms, device.pick(1, 20), device.clock, repeat)
            read = 2 * heads // 4 * width * length * device.dtype.itemsize / times["ours"]
            name = f"{shape_name}, {length} tokens"
            yield Number(f"{name}: ours", 1e6 * times["ours"], "us", f"{read / 1e9:.0f} GB/s of the cache are read")
            for rival, words in RIVALS.items():
                yield Number(f"{name}: {words}", times[rival] / times["ours"], "times as fast")


def decode_models(device: Device) -> Iterator[Number]:
    """Time one new token of whole models, a quarter of the KV heads, keys and values apart."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    for row in of_whole_models(Scale(quick=device.small, device=str(device.torch_device))):
        yield Number(row.name, row.ratio or 0.0, "times as fast", f"ours {row.ours:.3g} {row.unit}")


# ---- conversion --------------------------------------------------------------------------------------------------


def conversion(shape: str, device: Device) -> Iterator[Number]:
    """Two layers at real width, random weights, converted layer by layer to half of the KV cache with all its steps."""
    kind, settings = SHAPES[shape]
    more = {"num_hidden_layers": 2} | device.pick(NARROW, {})
    config: PretrainedConfig = kind(**(COMMON | settings | more))
    tokens, length = device.pick((256, 32), (16_384, 2048))
    with tempfile.TemporaryDirectory() as folder:
        parameters = random_checkpoint(config, Path(folder, "model"), device=device.of_processes)
        options = ConvertOptions(
            model=str(Path(folder, "model")),
            recipe="headfold_gqa",
            kv_ratio=0.5,
            calibration_tokens=tokens,
            eval_tokens=device.pick(64, 8192),
            sequence_length=length,
            overrides={"refinement.fit_steps": 2} if device.small else None,
            device=device.of_processes,
            layerwise=True,
            out=str(Path(folder, "out")),
            seed=0,
        )
        request = Convert(options).request
        there = replace(request, options=replace(options, device=str(device.torch_device)))
        device.forget_peak()
        record = DiskStore(there, lambda line: None).run(0.5, Path(folder, "out"))
    layers = config.num_hidden_layers
    seconds = {phase: spent / layers for phase, spent in record["seconds"].items()}
    parts = ", ".join(f"{phase} {spent:.1f}" for phase, spent in seconds.items() if spent >= 0.05)
    yield Number("seconds per layer", sum(seconds.values()), "s", f"{parts}; {tokens} tokens of calibration")
    yield Number("peak of the device", device.peak_bytes / GIGA, "GiB", f"{parameters / 1e9:.2f}B parameters in all")
    yield Number("peak of the process on the host", memory_peak() / GIGA, "GiB")
    yield Number("loss after, over before", record["loss"] / record["original_loss"], "", "of random weights")


# ---- a training step ---------------------------------------------------------------------------------------------


def step(device: Device) -> Iterator[Number]:
    """A training step at the width of Llama-3-8B, 4 layers, with KL from a teacher: seconds and HFU of its parts."""
    config = _llama_3(device, 4)
    length = device.pick(16, 4096)
    plan = _halved(config)
    with torch.device(device.of_processes):  # where drawing billions of weights takes no minutes
        model: Any = build(config, plan, device.dtype).train()
    model.to(device.torch_device)
    teacher: Any = random_model(config, device.dtype, device.of_processes).requires_grad_(False)
    teacher.to(device.torch_device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, length), generator=generator).to(device.torch_device)
    work = _operations(model, config, length)
    peak = device.peak_flops

    def told(name: str, seconds: float, operations: float | None = None) -> Number:
        note = ""
        if operations is not None:
            note = f"{operations / seconds / 1e12:.3g} TFLOP/s"
            note += f", HFU {operations / seconds / peak:.1%}" if peak else ""
        return Number(name, 1e3 * seconds, "ms", note)

    device.forget_peak()
    with torch.no_grad():
        seconds = {"teacher": device.seconds(lambda: final(teacher, ids))}
        reference = final(teacher, ids)
    seconds["forward"] = device.seconds(lambda: final(model, ids))
    both = device.seconds(lambda: _backward(final(model, ids).states.float().mean(), model))
    seconds["backward"] = max(1e-9, both - seconds["forward"])
    states = final(model, ids).states.detach()
    seconds["logits"] = device.seconds(lambda: _logits(model, states, ids, reference))
    yield told("teacher, up to its logits", seconds["teacher"], work["trunk"])
    yield told("forward, up to the logits", seconds["forward"], work["trunk"])
    yield told("backward, from the logits on", seconds["backward"], 2 * work["trunk"])
    yield told("logits and losses of both, forward and back", seconds["logits"], work["logits"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-5, fused=device.name == "cuda")
    _backward(final(model, ids).states.float().mean(), model, keep=True)
    yield told("AdamW of torch, in the weights' own dtype", device.seconds(optimiser.step))
    optimiser.zero_grad()
    optimiser.state.clear()
    yield Number("peak of the device", device.peak_bytes / GIGA, "GiB", f"{work['parameters'] / 1e9:.2f}B parameters")
    yield from _whole_step(device, model, teacher, ids, told, sum(seconds.values()), work)


def _whole_step(
    device: Device,
    model: Any,
    teacher: Any,
    ids: Tensor,
    told: Callable[..., Number],
    before: float,
    work: dict[str, float],
) -> Iterator[Number]:
    """The same step by the training's own engine, which DeepSpeed does not have on the emulated device."""
    where = device.of_processes
    dtype = "float32" if device.small else "bfloat16"
    settings = TrainSettings(
        batch_size=1, zero_stage=1, dtype=dtype, device="cpu" if where == "cpu" else "auto", gpus_per_worker=0
    )
    if device.name == "fgpu":
        config = _llama_3(device, 4)
        model, teacher = build(config, _halved(config), torch.float32), random_model(config)
        ids = torch.zeros(ids.shape, dtype=torch.long)
    group_of_one()
    engine = TrainEngine(model, settings, 100)
    loss_fn = objective("kl", 0.5, teacher)
    spent = device.seconds(lambda: engine.step(ids, loss_fn), rounds=device.pick(1, 5))
    note = " (on the CPU: DeepSpeed does not know the emulated device)" if device.name == "fgpu" else ""
    whole = 4 * work["trunk"] + work["logits"]
    yield told(f"whole step by the engine, ZeRO 1{note}", spent, whole)
    yield told("of it optimiser and engine", max(1e-9, spent - before))
    yield Number("tokens per second", ids.numel() / spent, "tokens/s")
    engine.close()


def _backward(loss: Tensor, model: Any, *, keep: bool = False) -> None:
    loss.backward()
    if not keep:
        model.zero_grad(set_to_none=True)


def _logits(model: Any, states: Tensor, ids: Tensor, reference: Final) -> None:
    """Logits and losses of given hidden states, and their gradients down to these."""
    states = states.clone().requires_grad_()
    head = model.get_output_embeddings()

    def cost(logits: Tensor, labels: Tensor, guide: Tensor | None) -> Tensor:
        assert guide is not None
        return 0.5 * kl(logits, guide) + 0.5 * language_modelling(logits, labels)

    in_chunks(Final(states, head, head.out_features), ids, cost, reference).backward()
    model.zero_grad(set_to_none=True)


def _operations(model: Any, config: LlamaConfig, length: int) -> dict[str, float]:
    """Operations of one sequence: of the trunk's forward pass, and of the logits of student and teacher.

    The trunk's are 2 N per token and those of causal attention; the student's head is run twice
    forward, since its logits are recomputed in the backward pass, and once backward, the teacher's
    twice forward too.
    """
    head = config.vocab_size * config.hidden_size
    parameters = sum(parameter.numel() for parameter in model.parameters())
    inner = parameters - 2 * head
    width = config.num_attention_heads * int(config.head_dim or 0)
    attention = 2 * config.num_hidden_layers * width * length**2
    trunk = 2.0 * inner * length + attention
    return {"parameters": parameters, "trunk": trunk, "logits": 2.0 * head * length * (2 + 2 + 2)}


def _llama_3(device: Device, layers: int, **more: Any) -> LlamaConfig:
    """Return a config of the width of Llama-3-8B, with so many layers; a small one for small devices."""
    width: dict[str, Any] = LLAMA_3 | NARROW | {"vocab_size": 2048} if device.small else LLAMA_3
    settings: dict[str, Any] = width | {"num_hidden_layers": layers} | more
    return LlamaConfig(**settings)


def _halved(config: LlamaConfig) -> AttentionPlan:
    """Half of the model's own KV heads in every layer."""
    heads, kv_heads = config.num_attention_heads, int(config.num_key_value_heads or 0) // 2
    heads_map = tuple(head * kv_heads // heads for head in range(heads))
    layers = (LayerPlan(heads_map, heads_map),) * config.num_hidden_layers
    return AttentionPlan(layers, int(config.head_dim or 0))


# ---- ZeRO 3 with offload -----------------------------------------------------------------------------------------


def offload(own_adam: bool, device: Device) -> Iterator[Number]:
    """Steps at the width of Llama-3-8B, 8 layers, with ZeRO 3 and the optimiser in host memory."""
    where = device.of_processes
    zero: dict[str, Any] = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    if not own_adam:
        zero["optimizer"] = {"params": {"torch_adam": True}}
    settings = TrainSettings(
        batch_size=1,
        zero_stage=3,
        dtype="bfloat16",
        activation_checkpointing=True,
        deepspeed=zero,
        device="cpu" if where == "cpu" else "auto",
    )
    config = _llama_3(device, device.pick(2, 8))
    length = device.pick(16, 2048)
    with tempfile.TemporaryDirectory() as folder:
        parameters = random_checkpoint(config, Path(folder, "model"), device=device.of_processes)
        group_of_one()
        device.forget_peak()
        engine = TrainEngine(load_trainable(Path(folder, "model"), settings), settings, 100)
    ids = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    losses = []
    spent = device.seconds(lambda: losses.append(engine.step(ids, objective())), rounds=device.pick(1, 3))
    note = f"{parameters / 1e9:.2f}B parameters, {length} tokens"
    note += "; on the CPU: DeepSpeed does not know the emulated device" if device.name == "fgpu" else ""
    yield Number("a step", spent, "s", note)
    yield Number("peak of the device", device.peak_bytes / GIGA, "GiB")
    yield Number("peak of the process on the host", memory_peak() / GIGA, "GiB")
    yield Number("loss of the last step, over the first", losses[-1] / losses[0], "")
    engine.close()


# ---- a cluster of one GPU ----------------------------------------------------------------------------------------


def doctor(device: Device) -> Iterator[Number]:
    """`headfold doctor` on this machine: NCCL, attention, a ZeRO step, storage, MLflow."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "doctor.json")
        only = device.pick(["--only", "attention", "--only", "training"], [])
        code = _headfold("doctor", "--storage", str(Path(folder, "storage")), "--json", str(file), *only)
        if not file.exists():
            raise RuntimeError(f"doctor exited with {code} and wrote no result")
        findings = json.loads(file.read_text(encoding="utf-8"))["findings"]
    for finding in findings:
        note = f"{finding['check']} {finding['status']}: {finding['result']}"
        for name, value in finding["numbers"].items():
            yield Number(f"{finding['check']}: {name.replace('_', ' ')}", value, "", note)
            note = ""
    if code:
        raise RuntimeError(
            "; ".join(f"{one['check']}: {one['result']}" for one in findings if one["status"] == "failed")
        )


def search(device: Device) -> Iterator[Number]:
    """The demo's search from planning to the promoted model, through Ray Tune, Ray Train and DeepSpeed."""
    gpus = device.pick({}, {"train.gpus_per_worker": 0.5, "resources.trial_gpus": 0.5, "train.dtype": "bf16"})
    small = {"rungs.steps": "[0,2]", "search.recipes": "[gqa]", "promotion.steps": 2, "data.train.tokens": 16_384}
    settings: dict[str, object] = {
        "name": "gpu",
        "search.recipes": "[gqa, headfold_gqa]",
        "search.kv_ratios": "[0.5]",
        "search.num_samples": 0,
        **gpus,
        **device.pick(small, {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcome.json")
        started = time.perf_counter()
        words = [f"{key}={value}" for key, value in settings.items()]
        code = _headfold("search", "configs/demo.yaml", f"storage={folder}/runs", "--json", str(file), *words)
        seconds = time.perf_counter() - started
        if code:
            raise RuntimeError(f"the search exited with {code}")
        outcome = json.loads(file.read_text(encoding="utf-8"))
    note = f"{len(outcome['trials'])} trials, {len(outcome['promoted'])} promotions"
    yield Number("the whole search", seconds, "s", note)
    for trial in outcome["trials"]:
        parts = ", ".join(f"{name} {spent:.1f}" for name, spent in trial["seconds"].items() if spent >= 0.05)
        for rung in trial["rungs"]:
            name = f"{trial['label']}: loss over the original's after {rung['step']} steps"
            rate = f"{rung.get('tokens_per_second', 0):.0f} tokens/s"
            yield Number(name, rung["loss_increase"], "nats", rate if rung["step"] else f"seconds: {parts}")
    for promoted in outcome["promoted"]:
        yield Number(f"{promoted['label']} promoted: loss over the original's", promoted["loss_increase"], "nats")


def _headfold(*words: str) -> int:
    """Run a command in a separate process, what it prints on stderr; its exit code."""
    command = [sys.executable, "-m", "orchestrator.main", *words]
    return subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode


# ---- vLLM --------------------------------------------------------------------------------------------------------


def served(name: str, device: Device) -> Iterator[Number]:
    """Decoding in vLLM, at the width of Llama-3-8B, 8 layers: half of the KV heads, against the original."""
    try:
        engine(name).find(None)
    except EngineError as error:
        raise Skipped(str(error)) from None
    config = _llama_3(device, device.pick(2, 8), vocab_size=2048)
    tokens, lengths = device.pick((4, "64"), (64, "1024,4096,8192"))
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(config, Path(folder, "model"), device=device.of_processes)
        model = checkpoint.load(Path(folder, "model"))
        checkpoint.save(convert(model, _halved(config)), Path(folder, "half"), Path(folder, "model"))
        record = engine_speed(
            Path(folder, "half"), Path(folder, "model"), engine=name, lengths=lengths, tokens=tokens, memory=2**30
        )
    for at in record["context_lengths"]:
        for key, words in (("checkpoint", "half of the KV heads"), ("original", "original")):
            rate = at[key]["decode_tokens_per_second"]
            yield Number(
                f"{at['context_length']} tokens, {words}", rate, "tokens/s", f"{record['engine']} {record['version']}"
            )


PARTS: dict[str, Callable[[Device], Iterator[Number]]] = {
    "kernel": kernel,
    "decode": decode_speed,
    "decode-models": decode_models,
    "convert-llama-3-8b": partial(conversion, "Llama-3-8B"),
    "convert-qwen3-8b": partial(conversion, "Qwen3-8B"),
    "convert-gpt-oss-20b": partial(conversion, "gpt-oss-20b"),
    "step": step,
    "offload": partial(offload, True),
    "offload-torch": partial(offload, False),
    "doctor": doctor,
    "search": search,
    "vllm": partial(served, "vllm"),
}
"""Parts by name, as `benchmarks.gpu.page` lists them."""
