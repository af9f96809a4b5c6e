"""Calibration and fits of a model of 16 bits multiply by TF32 on a GPU, and what they find is as good."""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from attention.base import products
from attention.calibration.calibrate import calibrate
from attention.conversion.convert import lift
from attention.conversion.refinement.refine import refine
from attention.families import geometry_of
from search_spaces.planning.context import PlanningContext, convert_with
from search_spaces.planning.planner import make_plan
from search_spaces.recipes.catalogue import recipe
from trainers.evaluation import evaluate

CPU_FLAGS = Path("/proc/cpuinfo")
GPU = torch.device("cuda")
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def test_on_and_put_back() -> None:
    with products.tensor_cores(GPU, torch.bfloat16):
        assert torch.get_float32_matmul_precision() == "high"
        with products.tensor_cores(GPU, torch.float16):
            assert torch.get_float32_matmul_precision() == "high"
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(KeyError), products.tensor_cores(GPU, torch.bfloat16):
        raise KeyError
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_products_are_exact_on_the_cpu_and_for_models_of_float32(device: str, dtype: torch.dtype) -> None:
    with products.tensor_cores(torch.device(device), dtype):
        assert torch.get_float32_matmul_precision() == ("medium" if products.onednn_is_faster() else "highest")
        one, other = torch.randn(2, 300, 300, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close((one @ other).double(), one.double() @ other.double(), rtol=1e-5, atol=1e-4)
    assert torch.get_float32_matmul_precision() == "highest"


def test_onednn_multiplies_on_cpus_of_amd_with_avx_512_if_it_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = {"cpu_name": "AMD EPYC", "avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(products, "_EXACT", 1.0)  # what is chosen does not depend on the processor of the test
    fresh = products.onednn_is_faster.__wrapped__
    assert fresh()
    for other in ({"cpu_name": "Intel(R) Xeon(R) Platinum 8481C"}, {"avx512_bf16": False}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda other=other: processor | other)
        assert not fresh()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not fresh()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(products, "_EXACT", 0.0)
    assert not fresh() and torch.get_float32_matmul_precision() == "highest"
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # as in an older torch
    assert not fresh() and not products.multiplies_bfloat16()


def test_calibration_fits_and_curves_are_in_its_scope(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for the GPU here: what counts is the setting at the products."""
    monkeypatch.setattr(products, "ACCELERATED", ("cpu",))
    seen: dict[str, set[str]] = {}

    def note(name: str, function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, set()).add(torch.get_float32_matmul_precision())
            return function(*args, **kwargs)

        return noted

    from attention.calibration import collecting
    from attention.conversion.refinement import local
    from search_spaces.planning import loss_increases

    monkeypatch.setattr(collecting.Collector, "see_call", note("calibration", collecting.Collector.see_call))
    monkeypatch.setattr(local, "fit_module", note("fit", local.fit_module))
    monkeypatch.setattr(loss_increases, "fit_module", note("curves", loss_increases.fit_module))
    model = tiny_model("llama", dtype=torch.bfloat16)
    rotary = type(model.model.rotary_emb)
    tokens = torch.randint(0, 64, (6, 24), generator=torch.Generator().manual_seed(0))
    with monkeypatch.context() as patched:
        patched.setattr(rotary, "forward", note("angles", rotary.forward))
        calibration = calibrate(model, tokens)
    calibrated = PlanningContext(geometry_of(model.config), lift(model), calibration, model, tokens)
    chosen = recipe("headfold", **{"allocation.fit_steps": 2, "refinement.fit_steps": 2, "allocation.tokens": 48})
    plan = make_plan(chosen, 0.5, calibrated, np.random.default_rng(0))
    converted = convert_with(chosen, model, plan, calibrated.calibration)
    refine(chosen.refinement, model, converted, tokens, chosen.knobs("refinement"))
    assert seen == {"angles": {"highest"}, "calibration": {"high"}, "fit": {"high"}, "curves": {"high"}}
    assert torch.get_float32_matmul_precision() == "highest"


class Rounded(TorchDispatchMode):
    """Products of float32 as TF32 does them: factors of 11 significant bits, sums of float32."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in PRODUCTS:
            self.count += 1
            *summand, one, other = args
            args = (*summand, *tree_map_only(Tensor, rounded, (one, other)))
        return func(*args, **(kwargs or {}))


def rounded(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.float32:
        return tensor
    return ((tensor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_rounding_is_that_of_tf32() -> None:
    assert rounded(torch.tensor([1 + 2**-10, 1 + 2**-12, -3.0])).tolist() == [1 + 2**-10, 1.0, -3.0]
    halves = torch.randn(1000, generator=torch.Generator().manual_seed(0)).half()
    for dtype in (torch.float16, torch.bfloat16):
        values = halves.to(dtype).float()
        assert torch.equal(rounded(values), values)


@pytest.mark.extended
def test_losses_after_a_conversion_are_the_same(demo_model: Any, demo_tokenizer: Any) -> None:
    """Calibration, measured groups, local fits and healing with rounded products: the loss moves by less than a
    fiftieth of what the conversion adds."""
    model = demo_model
    ids = [torch.tensor(demo_tokenizer(inspect.getsource(module))["input_ids"]) for module in (argparse, ast)]
    tokens, held_out = (part[: 24 * 128].view(24, 128) for part in ids)
    chosen = recipe("headfold_gqa", **{"refinement.fit_steps": 20})

    def converted() -> Any:
        calibrated = PlanningContext(geometry_of(model.config), lift(model), calibrate(model, tokens), model, tokens)
        plan = make_plan(chosen, 0.5, calibrated, np.random.default_rng(0))
        created = convert_with(chosen, model, plan, calibrated.calibration)
        refine(chosen.refinement, model, created, tokens, chosen.knobs("refinement"))
        return created

    exact = evaluate(converted(), held_out).loss
    with Rounded() as mode:  # of this thread: the tests fit layers one after the other
        created = converted()
    assert mode.count > 100
    added = exact - evaluate(model, held_out).loss
    assert added > 0.02 and abs(evaluate(created, held_out).loss - exact) < 0.02 * added


@pytest.mark.skipif(not CPU_FLAGS.is_file(), reason="lists the instructions of the processor on Linux alone")
def test_products_of_bfloat16_are_found_where_the_processor_has_them() -> None:
    flags = set(CPU_FLAGS.read_text(encoding="utf-8").split())
    assert products.multiplies_bfloat16() == bool(flags & {"avx512_bf16", "amx_bf16"})
