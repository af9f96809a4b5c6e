"""Every relaxation on a GPU, an emulated one: a step of training on it is a step on the CPU. Collected by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parameters import extended
from test_relaxations import PARTS, made, optimise
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.axes import Part

IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def trained(part: Part, device: torch.device, tiny_model: Any, *, made_there: bool) -> Any:
    """The relaxation after two steps on a device, and the losses. DeepSpeed moves what was made on the CPU."""
    model = tiny_model("llama", attention_bias=True)
    relaxation = made(part, model.to(device) if made_there else model)
    relaxation.model.to(device)
    with sdpa_kernel(SDPBackend.MATH):  # as the emulated GPU does it
        losses = optimise(relaxation, IDS.to(device), 2)
    return relaxation, losses


@pytest.mark.parametrize("made_there", [False, extended(True)])
@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_a_step_on_it_is_a_step_on_the_cpu(part: Part, made_there: bool, tiny_model: Any, fgpu: torch.device) -> None:
    expected, losses = trained(part, torch.device("cpu"), tiny_model, made_there=made_there)
    result, on_device = trained(part, fgpu, tiny_model, made_there=made_there)
    assert on_device == pytest.approx(losses, rel=1e-6, abs=1e-5)
    assert result.metrics() == pytest.approx(expected.metrics(), abs=1e-4)
    assert result.remaining() == pytest.approx(expected.remaining(), abs=1e-4)
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(result.model.state_dict()[name].cpu(), tensor, atol=1e-4, rtol=1e-3)
    for heads, other in zip(expected.collapse(), result.collapse(), strict=True):
        torch.testing.assert_close(other.k.cpu(), heads.k, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("part", PARTS, ids=lambda p: p.name)
def test_all_that_it_holds_moves_with_the_model(part: Part, tiny_model: Any, fgpu: torch.device) -> None:
    """Tensors that are neither parameters nor buffers stay where they were made."""
    relaxation = made(part, tiny_model("llama"))
    relaxation.begin(0)
    relaxation.model.to(fgpu)
    assert {t.device for t in (*relaxation.model.parameters(), *relaxation.model.buffers())} == {fgpu}
