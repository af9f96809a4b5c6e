"""Conversion as a whole: identity, lifting, dtypes, and what is refused."""

import pytest
import torch

from attention.axes import Axis, Knob
from attention.conversion.convert import convert, lift
from attention.families import families
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan, LayerPlan, PlanError


def tokens() -> torch.Tensor:
    return torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(families()))
@torch.no_grad()
def test_identity_plan_is_bit_equal(name: str, dtype: torch.dtype, tiny_model) -> None:
    model = tiny_model(name, dtype=dtype)  # as loaded: a cast by .to() would round the rotary frequencies too
    same = convert(model, AttentionPlan.identity(2, 4, 8))
    assert same.dtype == dtype and torch.equal(same(tokens()).logits, model(tokens()).logits)


@torch.no_grad()
def test_identity_plan_is_bit_equal_on_the_demo(demo_model) -> None:
    same = convert(demo_model, AttentionPlan.identity(4, 8, 32))
    x = torch.randint(2048, (2, 64), generator=torch.Generator().manual_seed(0))
    assert torch.equal(same(x).logits, demo_model(x).logits)


GROUPED = [n for n in sorted(families()) if families()[n].plain_config(families()[n].config_class(), 1) is not None]


@pytest.mark.parametrize("name", GROUPED)
@torch.no_grad()
def test_gqa_checkpoint_is_lifted_without_loss(name: str, tiny_model) -> None:
    model = tiny_model(name, num_key_value_heads=2)
    assert plan_of(model).kv_ratio == 0.5 and lift(model)[0].k.shape[0] == 4
    lifted = convert(model, AttentionPlan.identity(2, 4, 8))
    assert torch.allclose(lifted(tokens()).logits, model(tokens()).logits, atol=1e-5)
    back = convert(lifted, AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 0, 1, 1)),) * 2, 8))
    assert torch.allclose(back(tokens()).logits, model(tokens()).logits, atol=1e-5)


@pytest.mark.parametrize("name", sorted(families()))
@torch.no_grad()
def test_converted_model_is_lifted_without_loss(name: str, tiny_model) -> None:
    """Also across forms: families with a fused projection keep it in an identity layer and nowhere else."""
    layers = (LayerPlan((0, 1, 0, 2), (0, 0, 1, 0)), LayerPlan.identity(4))
    model = convert(tiny_model(name), AttentionPlan(layers, 8))
    lifted = convert(model, AttentionPlan.identity(2, 4, 8))
    assert torch.allclose(lifted(tokens()).logits, model(tokens()).logits, atol=1e-5)
    again = convert(lifted, AttentionPlan(layers, 8))
    assert torch.allclose(again(tokens()).logits, model(tokens()).logits, atol=1e-5)


@torch.no_grad()
def test_mean_worked_example(tiny_model) -> None:
    model = tiny_model("qwen2")
    plan = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)),) * 2, 8)
    converted = convert(model, plan, fusion="mean")
    k, v = model.model.layers[0].self_attn.k_proj, model.model.layers[0].self_attn.v_proj
    new = converted.model.layers[0].self_attn
    assert torch.allclose(new.k_proj.weight[:8], (k.weight[0:8] + k.weight[8:16]) / 2)
    assert torch.allclose(new.v_proj.weight[:8], (v.weight[0:8] + v.weight[24:32]) / 2)
    assert torch.allclose(new.v_proj.bias[8:], (v.bias[8:16] + v.bias[16:24]) / 2)
    assert new.k_proj.weight.shape == (16, 32) and torch.equal(
        new.q_proj.weight, model.model.layers[0].self_attn.q_proj.weight
    )


def test_the_given_model_is_untouched(tiny_model) -> None:
    model = tiny_model("llama")
    before = {k: t.clone() for k, t in model.state_dict().items()}
    convert(model, AttentionPlan((LayerPlan((0,) * 4, (0,) * 4),) * 2, 8))
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    assert plan_of(model).kv_ratio == 1


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (AttentionPlan.identity(3, 4, 8), "3 layers, the checkpoint .* has 2"),
        (AttentionPlan.identity(2, 8, 8), "8 query heads per layer, .* has 4"),
        (AttentionPlan.identity(2, 4, 16), "16 head_dim, .* has 8"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: AttentionPlan, message: str, tiny_model) -> None:
    with pytest.raises(PlanError, match=message):
        convert(tiny_model("llama"), plan)


def test_unknown_parts_and_settings_are_refused(tiny_model) -> None:
    model, plan = tiny_model("llama"), AttentionPlan.identity(2, 4, 8)
    with pytest.raises(ValueError, match="fusion must be one of .*'mean'.* got 'median'"):
        convert(model, plan, fusion="median")
    with pytest.raises(ValueError, match="alignment must be one of"):
        convert(model, plan, alignment="astrology")
    with pytest.raises(ValueError, match="fusion=mean has no setting 'sharpness'"):
        convert(model, plan, fusion="mean", fusion_settings={"sharpness": 1})
    with pytest.raises(ValueError, match="needs a calibration"):
        convert(model, plan, fusion="least_squares")


def test_knobs_check_their_values() -> None:
    knob = Knob("steps", "int", "how many", low=1, high=20)
    assert knob.check(20) == 20
    for bad in (0, 21, 1.5, True, "3"):
        with pytest.raises(ValueError, match="steps must"):
            knob.check(bad)
    with pytest.raises(ValueError, match=r"must lie in \[1, 20\], got 0"):
        Knob("steps", "int", "a default out of range", low=1, high=20, default=0)
    with pytest.raises(ValueError, match="a choice needs choices"):
        Knob("kind", "choice", "none")
    with pytest.raises(ValueError, match="kind must be one of"):
        Knob("kind", "colour", "none")


def test_the_default_of_a_knob_is_that_of_the_parameter() -> None:
    axis = Axis("flavour", "attention.conversion.alignment")

    def deeper(*, depth: int = 2, **others: int) -> None: ...

    knobs = (Knob("depth", "int", "how deep"), Knob("sides", "int", "how many"))
    axis.part("cut", source="here", knobs=knobs, passes_to=deeper)(lambda *, sides=3, **others: None)
    assert {knob.name: knob.default for knob in axis._parts["cut"].knobs} == {"depth": 2, "sides": 3}
    for wrong in (Knob("heigth", "int", "of no parameter"), Knob("depth", "int", "declared twice", default=2)):
        with pytest.raises(ValueError, match=f"knob {wrong.name}: its default must stand once, in the signature of"):
            axis.part("wrong", source="here", knobs=(wrong,))(deeper)
    with pytest.raises(ValueError, match=r"depth must lie in \[5, 9\], got 2"):
        axis.part("wrong", source="here", knobs=(Knob("depth", "int", "a default out of range", 5, 9),))(deeper)


def test_an_axis_refuses_two_parts_of_one_name() -> None:
    axis = Axis("flavour", "attention.conversion.alignment")
    axis.part("sweet", source="here")(lambda: 1)
    with pytest.raises(ValueError, match="already has a part named 'sweet'"):
        axis.part("sweet", source="there")(lambda: 2)
