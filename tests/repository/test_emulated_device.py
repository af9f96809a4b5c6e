"""The emulated GPU refuses what CUDA refuses, allows what CUDA allows, and computes what the CPU computes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from emulated_device import NAME, SYNCS, EmulatedTensor, emulated_device, is_emulated
from torch import Tensor, nn

X = torch.arange(12.0).view(3, 4)
Y = torch.tensor([1.0, 2.0, 3.0, 4.0])


def set_items(x: Tensor, index: Any, value: Any) -> Tensor:
    x[index] = value
    return x


MIXED: dict[str, Callable[[Tensor], object]] = {
    "a sum": lambda x: x + Y,
    "a sum in place": lambda x: x.add_(Y),
    "a sum of the CPU's in place": lambda x: Y.clone().add_(x[0]),
    "a number of the CPU's in place": lambda x: torch.zeros(()).add_(x.sum()),
    "a product": lambda x: x @ Y,
    "a product of einsum": lambda x: torch.einsum("ij,j->i", x, Y),
    "a linear layer": lambda x: F.linear(x, torch.ones(2, 4)),
    "a norm": lambda x: F.layer_norm(x, (4,), torch.ones(4)),
    "a choice": lambda x: torch.where(x > 0, x, X),
    "joined": lambda x: torch.cat([x, X]),
    "stacked": lambda x: torch.stack([x, X]),
    "joined with a number": lambda x: torch.stack([x.sum(), torch.tensor(1.0)]),
    "places by index_select": lambda x: x.index_select(0, torch.tensor([0])),
    "places by index_add": lambda x: x.index_add(0, torch.tensor([0]), x[:1]),
    "places by gather": lambda x: x.gather(1, torch.zeros(3, 1, dtype=torch.long)),
    "indices of the device on the CPU": lambda x: X[torch.tensor([0]).to(x.device)],
    "values of the CPU": lambda x: set_items(x, [0, 1], torch.ones(2, 4)),
    "values of the device on the CPU": lambda x: set_items(X.clone(), [0, 1], x[:2]),
    "an embedding": lambda x: F.embedding(torch.tensor([0]), x),
    "equality": lambda x: torch.equal(x, X),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], X[None]),
    "numbers drawn by the CPU's generator": lambda x: torch.randn(3, device=x.device, generator=torch.Generator()),
    "numbers drawn in place": lambda x: x.normal_(generator=torch.Generator()),
    "a choice drawn by it": lambda x: torch.multinomial(x.abs() + 1, 1, generator=torch.Generator()),
    "an order drawn by it": lambda x: torch.randperm(3, device=x.device, generator=torch.Generator()),
    "a model on the CPU": lambda x: nn.Linear(4, 2)(x),
    "weights exchanged": lambda x: setattr(x, "data", X),
}


@pytest.mark.parametrize("case", MIXED)
def test_it_refuses_what_cuda_refuses(case: str, fgpu: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"device|backend|tensor of cpu|Expected"):
        MIXED[case](X.to(fgpu))


def test_numpy_and_what_cuda_has_no_kernel_for_are_refused(fgpu: torch.device) -> None:
    x = X.to(fgpu)
    with pytest.raises(TypeError, match="to numpy"):
        x.numpy()
    with pytest.raises(TypeError, match="to numpy"):
        np.asarray(x)
    with pytest.raises(NotImplementedError, match="histogram"):
        torch.histogram(x, 3)


SAME: dict[str, Callable[[torch.device], Tensor]] = {
    "made there": lambda d: torch.arange(5.0, device=d) + torch.eye(5, device=d) + torch.zeros((), device=d),
    "made from numbers": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "made from an array": lambda d: torch.as_tensor(np.ones(3), device=d, dtype=torch.float32),
    "made like another": lambda d: X.to(d).new_tensor([1, 2]) + X.to(d).new_zeros(2),
    "numbers of the CPU": lambda d: X.to(d) * torch.tensor(2.0) + 1,
    "places of the CPU": lambda d: X.to(d)[torch.tensor([2, 0])],
    "lists of places": lambda d: X.to(d)[[2, 0], [1, 3]],
    "no places": lambda d: X.to(d)[[]],
    "true ones": lambda d: X.to(d)[X.to(d) > 3],
    "a row set by the CPU": lambda d: set_items(X.to(d), 0, Y),
    "places set": lambda d: set_items(X.to(d), [0, 1], Y.to(d)),
    "places set to a number": lambda d: set_items(X.to(d), (slice(None), [0, 1]), torch.tensor(7.0)),
    "copied": lambda d: torch.zeros(3, 4, device=d).copy_(X),
    "copied back": lambda d: torch.zeros(3, 4).copy_(X.to(d)),
    "through a view": lambda d: (lambda x: (x.view(-1)[2:4].mul_(9), x)[1])(X.to(d)),
    "of fewer bits": lambda d: X.to(d).to(torch.bfloat16) @ Y.to(d, torch.bfloat16),
    "solved": lambda d: torch.linalg.svd((X @ X.T).to(d))[1] + torch.linalg.eigvalsh((X @ X.T).to(d)),
    "ordered by its generator": lambda d: torch.randperm(9, device=d, generator=torch.Generator(d).manual_seed(3)),
    "in steps": lambda d: torch.arange(2, 9, 3, device=d) + torch.linspace(0, 1, 3, device=d),
    "drawn": lambda d: torch.randn(4, device=d, generator=torch.Generator(d).manual_seed(3)),
    "conjugates": lambda d: (lambda z: z.conj() / z.abs() + z.mH)(
        torch.complex(X[:, :3], Y[:3, None] - X[:, :3]).to(d)
    ),
    "experts counted": lambda d: torch.histc(torch.tensor([0, 2, 2], dtype=torch.int32, device=d), 4, 0, 3).long(),
    "in a smaller type": lambda d: torch.bincount(torch.tensor([0, 2, 2], device=d)),
    "attention": lambda d: F.scaled_dot_product_attention(X[None].to(d), X[None].to(d), X[None].to(d), is_causal=True),
    "attention under a mask": lambda d: F.scaled_dot_product_attention(
        *(X[None].to(d),) * 3, attn_mask=torch.eye(3, dtype=torch.bool).logical_or(X[:, :3] > 5).to(d)
    ),
    "grouped attention": lambda d: F.scaled_dot_product_attention(
        torch.ones(1, 4, 3, 8, device=d), *(torch.ones(1, 2, 3, 8, device=d),) * 2, enable_gqa=True
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_it_computes_what_the_cpu_computes(case: str, fgpu: torch.device) -> None:
    result = SAME[case](fgpu)
    there = case != "copied back"
    assert isinstance(result, EmulatedTensor) == there and (result.device == fgpu) == there
    if case == "experts counted":  # the CPU has no histc of whole numbers
        assert result.tolist() == [1, 0, 2, 0]
        return
    torch.testing.assert_close(result.cpu(), SAME[case](torch.device("cpu")))


def trained(device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of three steps of a small network; a model that was trained before has set up autograd."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 6), nn.LayerNorm(6), nn.Linear(6, 8))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    model.register_buffer("scale", torch.tensor([2.0]))
    model = copy.deepcopy(model.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.arange(8).to(device)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(tokens) * model.get_buffer("scale"), tokens)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def test_training_on_it_is_training_on_the_cpu(fgpu: torch.device) -> None:
    expected, weights = trained(torch.device("cpu"))  # first, so that autograd has begun before the device is used
    losses, result = trained(fgpu)
    assert losses == pytest.approx(expected, abs=1e-6) and losses[-1] < losses[0]
    assert result.keys() == weights.keys()
    for name, tensor in result.items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-6, rtol=0)


def test_a_module_moves_with_its_buffers_and_shared_weights(fgpu: torch.device) -> None:
    model = nn.ModuleDict({"into": nn.Linear(4, 4, bias=False), "out": nn.Linear(4, 4, bias=False)})
    model["out"].weight = model["into"].weight
    moved = model.to(fgpu).to(torch.bfloat16)
    assert isinstance(moved["into"].weight, nn.Parameter) and moved["into"].weight is moved["out"].weight
    assert moved["into"].weight.device == fgpu and moved["into"].weight.dtype == torch.bfloat16
    moved["into"].weight.data = torch.ones(2, 4, device=fgpu)
    assert moved["out"](torch.ones(1, 4, device=fgpu)).shape == (1, 2) and moved["out"].weight.requires_grad
    assert moved.to("cpu")["into"].weight.device.type == "cpu"


def test_waits_for_the_device_are_counted(fgpu: torch.device) -> None:
    x = X.to(fgpu)
    SYNCS.clear()
    for wait in (lambda: x.sum().item(), lambda: x.tolist(), lambda: x.cpu(), lambda: x[x > 3], lambda: bool(x.any())):
        before = SYNCS.total()
        wait()
        assert SYNCS.total() == before + 1
    assert all(line.startswith("tests/repository/test_emulated_device.py:") for line in SYNCS)
    before = SYNCS.total()
    x[torch.tensor([0])].add_(1).to(torch.float64).matmul(x.double().T)
    assert SYNCS.total() == before


def test_nothing_of_it_is_left_afterwards() -> None:
    before = torch.tensor, torch.as_tensor, torch.Generator
    with emulated_device() as device, emulated_device() as again:
        assert device == again and torch.accelerator.is_available()
        stored = torch.ones(2, device=device)
    assert (torch.tensor, torch.as_tensor, torch.Generator) == before
    assert not torch.accelerator.is_available() and torch.tensor([1.0]).device.type == "cpu"
    with pytest.raises(RuntimeError, match="in use only"):
        _ = stored + 1
    with pytest.raises((RuntimeError, NotImplementedError), match=NAME):
        torch.ones(2, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = torch.ones(3, requires_grad=True)
        (weight * 2).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_device_as_context_is_what_it_was_after_the_first_use_outside_of_it() -> None:
    """In a separate process: torch caches the functions that `with torch.device(...)` changes."""
    code = """
import torch
from emulated_device import emulated_device
with emulated_device(), torch.device("meta"):
    assert torch.arange(3).is_meta
with torch.device("meta"):
    assert torch.arange(3).is_meta and torch.eye(2).is_meta
"""
    helpers = Path(__file__).parents[1] / "helpers"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(helpers)})


def test_what_is_made_within_the_device_as_context_is_on_it(fgpu: torch.device) -> None:
    with fgpu:
        created = (torch.arange(0, 6, 2, dtype=torch.float), torch.eye(2), torch.zeros(2), torch.linspace(0, 1, 3))
        shared = torch.arange(3, device="cpu")
    assert [is_emulated(each.device) for each in created] == [True] * 4
    assert not is_emulated(shared.device) and created[0].cpu().tolist() == [0.0, 2.0, 4.0]
