"""The fused decode kernel: in Triton's interpreter here, on the device where there is one; and when it is taken."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from attention.modeling import decoding, kernels
from attention.modeling.decoding import HeadMaps
from attention.modeling.kernels import Tables
from attention.plan import LayerPlan

HERE = Path(__file__).resolve().parent
DECOUPLED = LayerPlan((0, 1, 0, 2, 2, 2), (0, 0, 1, 1, 0, 1))
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not to be had here: its extra is for Linux"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    """Differences from the reference, from a separate process: Triton chooses the interpreter when it is loaded."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, HERE / "interpreted_kernel.py"], env=environment, capture_output=True, text=True
    )
    if "only 0-dimensional arrays" in done.stderr:
        pytest.skip("this Triton's interpreter does not take this numpy's one-element arrays")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@needs_triton
def test_in_the_interpreter_it_equals_the_expanded_attention(interpreted: dict[str, float]) -> None:
    limits = {"dtype bfloat16": 1e-2, "dtype float16": 1e-3}
    compared = {name: apart for name, apart in interpreted.items() if name not in ("splits", "wrong map")}
    assert len(compared) >= 24
    assert {n: apart for n, apart in compared.items() if not apart <= limits.get(n, 1e-5)} == {}


@pytest.mark.slow
@needs_triton
def test_the_comparison_would_see_a_wrong_map_and_has_several_splits(interpreted: dict[str, float]) -> None:
    assert interpreted["wrong map"] > 0.05
    assert interpreted["splits"] > 1


@pytest.mark.extended
@needs_triton
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90])
def test_it_compiles_for_devices_that_are_not_here(
    capability: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to machine code, for A100 and H100, and into the memory that a program may share there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attention.modeling.kernels import flash_decode as made

    block = 64 if dtype == "bf16" else 32
    plain = {"HEAD": 80, "KEY_WIDTH": 1, "VALUE_WIDTH": 1, "K": 128, "V": 128, "BLOCK": block}
    wide = {"HEAD": 128, "KEY_WIDTH": 2, "VALUE_WIDTH": 2, "K": 256, "V": 256, "BLOCK": block // 2}
    others = {"M": 16, "N": 4, "MASK": 1, "UPCAST": False}
    states = dict.fromkeys(("query", "key", "value"), f"*{dtype}")
    tables = dict.fromkeys(("keys", "members", "values", "counts", "value_map"), "*i32")
    parts = dict.fromkeys(("out", "maxima", "sums"), "*fp32")
    names = dict.fromkeys((*plain, *others), "constexpr")
    types = {**states, **tables, **parts, "mask": "*u8", "scaling": "fp32", **names}
    merged = {"parts": "*fp32", "maxima": "*fp32", "sums": "*fp32", "out": f"*{dtype}"}
    for kernel, given, constants in (
        (made._attend_split, types, plain | others),
        (made._attend_split, types, wide | others),
        (made._merge_splits, merged, {"WIDTH": 80, "D": 128, "SPLITS": 64}),
    ):
        signature = {name: given.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert len(compiled.asm["cubin"]) > 1000
        assert compiled.metadata.shared <= 99 * 1024


@needs_cuda
@needs_triton
@pytest.mark.parametrize("dtype", kernels.TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [32, 64, 80, 128])
def test_on_the_device_it_equals_the_expanded_attention(dtype: torch.dtype, width: int) -> None:
    for tokens in (1, 65, 4097):
        assert kernels.difference(DECOUPLED, width, tokens, "cuda", dtype) <= kernels.TOLERANCE[dtype]


# ---- tables ------------------------------------------------------------------------------------------------------


def test_tables_worked_example() -> None:
    tables = Tables.of(DECOUPLED)
    assert tables.keys.tolist() == [0, 1, 2]
    assert [[h for h in row if h >= 0] for row in tables.members.tolist()] == [[0, 2], [1], [3, 4, 5]]
    assert tables.members.shape == (3, 16)  # a matrix product on an accelerator has at least so many rows
    assert tables.values.tolist() == [[0, 1], [0, -1], [0, 1]]
    assert tables.counts.tolist() == [2, 1, 2]


def test_a_wide_group_becomes_several_units() -> None:
    tables = Tables.of(LayerPlan((0,) * 80, (0,) * 80))
    assert tables.keys.tolist() == [0, 0]
    assert tables.members.shape == (2, 64)
    assert sorted(h for row in tables.members.tolist() for h in row if h >= 0) == list(range(80))


def test_copies_on_devices_are_not_pickled() -> None:
    maps = HeadMaps.of(DECOUPLED)
    moved = maps.kernel.on(torch.device("meta"))
    assert moved.keys.device.type == "meta" and maps.kernel.on(torch.device("meta")) is moved
    for other in (pickle.loads(pickle.dumps(maps)), copy.deepcopy(maps)):
        assert other.kernel._copies == {}
        assert torch.equal(other.kernel.members, maps.kernel.members)


# ---- when it is taken --------------------------------------------------------------------------------------------


def states(width: int = 8, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [
        torch.zeros(1, heads, length, width, device=device, dtype=dtype) for heads, length in ((6, 1), (3, 5), (2, 5))
    ]


def test_on_the_cpu_it_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "fused_decode", lambda *a: pytest.fail("taken"))
    assert not kernels.takes(*states(), None)
    assert decoding.decode(*states(), HeadMaps.of(DECOUPLED), None, None).shape == (1, 6, 1, 8)


def test_the_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADFOLD_TRITON", "0")
    kernels.available.cache_clear()
    try:
        assert not kernels.available()
    finally:
        kernels.available.cache_clear()


def test_a_kernel_that_fails_or_errs_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so once, with the reason, and the other ways are taken."""
    device = torch.device("cpu")

    def fail(*_: object) -> float:
        raise RuntimeError("no such chip")

    for outcome, output in (
        (fail, "RuntimeError: no such chip"),
        (lambda *_: 0.5, "differs from the reference by 0.5"),
    ):
        kernels.trusted.cache_clear()
        monkeypatch.setattr(kernels, "difference", outcome)
        with pytest.warns(UserWarning, match=output):
            assert not kernels.trusted(device, torch.float32, 32)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not kernels.trusted(device, torch.float32, 32)
    kernels.trusted.cache_clear()
    monkeypatch.setattr(kernels, "difference", lambda *_: 1e-6)
    assert kernels.trusted(device, torch.float32, 32)
    kernels.trusted.cache_clear()
