"""DirectShare on the demo checkpoint: what it saves in parameters, on disk and in memory, and that it stays so."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from sizes import file_bytes, parameters, resident_bytes

from attention.conversion.convert import convert, lift
from attention.families import family_of, geometry_of
from attention.io import checkpoint
from attention.plan import AttentionPlan, HeadShare
from search_spaces.sharing.matching import match_heads

HEAD = 3 * 32 * 256  # q, k and v rows of one head of the demo checkpoint
TOKENS = torch.randint(1, 2048, (6, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def plan(demo_model) -> AttentionPlan:
    identity = AttentionPlan.identity(4, 8, 32)
    return AttentionPlan(identity.layers, 32, match_heads(lift(demo_model), 0.3))


@pytest.fixture(scope="module")
def shared(demo_model, plan) -> Any:
    return convert(demo_model, plan)


def weight_bytes(folder: Path) -> int:
    """Bytes of the tensors themselves, without the file's header."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - not a mapping
    return total


def test_parameters_and_file_fall_by_exactly_the_shared_heads(demo_model, plan, shared, tmp_path: Path) -> None:
    assert len(plan.shares) == 9  # 0.3 of 32
    assert parameters(demo_model) - parameters(shared) == 9 * HEAD
    whole = checkpoint.save(convert(demo_model, plan.unshared), tmp_path / "whole", plain=False)
    folder = checkpoint.save(shared, tmp_path / "shared")
    assert weight_bytes(whole) - weight_bytes(folder) == 4 * 9 * HEAD
    assert abs(file_bytes(whole) - file_bytes(folder) - 4 * 9 * HEAD) < 2048  # names and offsets in the header
    back: Any = checkpoint.load(folder)
    assert torch.equal(back(TOKENS).logits, shared(TOKENS).logits)
    maps = 2 * 4 * 8 * 8  # the index maps that a converted model carries as buffers
    assert resident_bytes(demo_model) + maps - resident_bytes(back) == 4 * 9 * HEAD


@torch.no_grad()
def test_logits_are_those_of_heads_copied_by_hand(demo_model, plan, shared) -> None:
    copied = copy.deepcopy(demo_model)
    layers = copied.model.layers
    for s in plan.shares:
        ours, theirs = (slice(h * 32, (h + 1) * 32) for h in (s.head, s.source_head))
        for name in ("q_proj", "k_proj", "v_proj"):
            target, source = (getattr(layers[i].self_attn, name) for i in (s.layer, s.source_layer))
            target.weight[ours] = source.weight[theirs]
    assert torch.allclose(shared(TOKENS).logits, copied(TOKENS).logits, atol=1e-4)
    assert (shared(TOKENS).logits - demo_model(TOKENS).logits).abs().max() > 0.1


def test_after_fifty_steps_shared_heads_are_still_one_tensor(shared, plan, tmp_path: Path) -> None:
    """Trained on ids that repeat, which it learns; in memory, in the optimiser and on disk there is one of each."""
    model = copy.deepcopy(shared).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(50):
        loss = model(TOKENS[:2], labels=TOKENS[:2]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert parameters(model) == parameters(shared)
    state = sum(t.numel() for s in optimizer.state.values() for t in s.values() if t.dim())
    assert state == 2 * parameters(model)
    model.eval()
    assert_one_tensor(model, plan.shares)
    back = checkpoint.load(checkpoint.save(model, tmp_path / "trained"))
    assert_one_tensor(back, plan.shares)
    moved = family_of(back.config).attention_modules(back)[0]
    before = family_of(shared.config).attention_modules(shared)[0]
    assert not torch.equal(moved.q_proj.weight, before.q_proj.weight)  # type: ignore[arg-type, union-attr]


@torch.no_grad()
def assert_one_tensor(model: Any, shares: tuple[HeadShare, ...]) -> None:
    """Both users show the same numbers, and changing a lent head in place changes the borrower's result."""
    family, geometry = family_of(model.config), geometry_of(model.config)
    modules = family.attention_modules(model)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    for s in shares:
        ours, theirs = (family.read(modules[i], geometry) for i in (s.layer, s.source_layer))
        for name in ("q", "k", "v"):
            assert torch.equal(getattr(ours, name)[s.head], getattr(theirs, name)[s.source_head])
        for name in ("q_proj", "k_proj", "v_proj"):
            lender, borrower = (getattr(modules[i], name) for i in (s.source_layer, s.layer))
            stored = lender.own_weight if hasattr(lender, "own_weight") else lender.weight
            start = lender.offset(s.source_head) if hasattr(lender, "offset") else 32 * s.source_head
            kept, out = stored[start : start + 32].clone(), borrower(x)[:, 32 * s.head : 32 * (s.head + 1)]
            stored[start : start + 32] *= 2
            torch.testing.assert_close(borrower(x)[:, 32 * s.head : 32 * (s.head + 1)], 2 * out)
            stored[start : start + 32] = kept


MEASURE = """
import os, sys
import torch
from attention.io import checkpoint
torch.set_num_threads(1)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
checkpoint.load(sys.argv[2])  # imports and pools are paid for
before = resident()
model = checkpoint.load(sys.argv[1])
with torch.no_grad():
    model(torch.zeros(1, 2, dtype=torch.long))
print(sum(p.numel() for p in model.parameters()), resident() - before)
"""


@pytest.mark.extended
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from Linux' /proc")
def test_resident_memory_falls_by_the_shared_heads(tiny_model, tmp_path: Path) -> None:
    """A random model of 8 layers of 16 heads of 64, loaded and run in separate processes: at least 90 % shows."""
    wide = {"num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16}
    model = tiny_model("llama", **wide, head_dim=64, intermediate_size=64)
    plan = AttentionPlan(AttentionPlan.identity(8, 16, 64).layers, 64, match_heads(lift(model), 0.3))
    small = checkpoint.save(tiny_model("llama"), tmp_path / "small")
    result = []
    for name, each in (("whole", plan.unshared), ("shared", plan)):
        folder = checkpoint.save(convert(model, each), tmp_path / name, plain=False)
        command = [sys.executable, "-c", MEASURE, str(folder), str(small)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        result.append([int(number) for number in out.split()])
    saved = 4 * len(plan.shares) * 3 * 64 * 1024
    assert len(plan.shares) == 38 and 4 * (result[0][0] - result[1][0]) == saved
    assert result[0][1] - result[1][1] >= 0.9 * saved
