"""CONTRIBUTING.md promises that adding a part is adding one file: its examples are taken at their word."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXTENDING = REPOSITORY / "examples" / "extending"
PACKAGES = ("attention", "search_spaces", "trainers", "orchestrator")

MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from attention.conversion.convert import convert, read_layers
from attention.plan import AttentionPlan, LayerPlan
from search_spaces.recipes.catalogue import recipe

SHAPE = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=4, bos_token_id=None, eos_token_id=None)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
plan = AttentionPlan((LayerPlan.from_groups([[0, 1], [2, 3]], [[0, 1], [2, 3]], 4),), head_dim=8)
ids = torch.arange(8)[None]
"""
USES = {
    "fusion_strongest.py": """
with torch.no_grad():
    model.model.layers[0].self_attn.k_proj.weight[8:16] *= 3  # head 1
    model.model.layers[0].self_attn.v_proj.weight[24:32] *= 3  # head 3
new = convert(model, plan, fusion="strongest", fusion_settings={"norm_order": 3.0})
old, kept = read_layers(model)[0], read_layers(new)[0]
assert torch.equal(kept.k[0], old.k[1]) and torch.equal(kept.v[1], old.v[3]), "the strongest heads are not kept"
assert recipe("gqa", fusion="strongest").knobs("fusion") == {"norm_order": 2.0}
try:
    convert(model, plan, fusion="strongest", fusion_settings={"norm_order": 99.0})
except ValueError as error:
    assert "norm_order must lie in [1.0, 8.0], got 99.0" in str(error), error
else:
    raise AssertionError("99.0 was taken")
""",
    "grouping_strided.py": """
import numpy as np
from attention.conversion.convert import lift
from attention.families import geometry_of
from search_spaces.planning.planner import PlanningContext, make_plan
context = PlanningContext(geometry_of(model.config), lift(model), model=model)
made = make_plan(recipe("gqa", grouping="strided"), 0.5, context, np.random.default_rng(0))
assert made.layers[0].key_groups == made.layers[0].value_groups == ((0, 2), (1, 3)), made
""",
    "family_arcee.py": """
from transformers import ArceeConfig, ArceeForCausalLM
from attention.families import families, geometry_of
assert "arcee" in set(families())
model = ArceeForCausalLM(ArceeConfig(**SHAPE)).eval()
assert geometry_of(model.config).num_heads == 4
same = convert(model, AttentionPlan.identity(1, 4, 8))
assert torch.equal(same(ids).logits, model(ids).logits), "an identity plan changes the logits"
assert convert(model, plan)(ids, use_cache=True).past_key_values.layers[0].keys.shape[1] == 2
""",
    "export_mha.py": """
from attention.io import checkpoint
from attention.io.export import export
small = convert(model, plan)
checkpoint.save(small, "small")
report = export("small", "mha", "large", allow_larger_cache=True)
assert report.kv_bytes_per_token_after == 2 * report.kv_bytes_per_token_before
large = LlamaForCausalLM.from_pretrained("large").eval()
assert large.config.num_key_value_heads == 4
torch.testing.assert_close(large(ids).logits, small(ids).logits)
""",
    "scheduler_median.py": """
from types import SimpleNamespace
from orchestrator.search.schedulers import RungProblem, make_scheduler
scheduler = make_scheduler("median", RungProblem(rungs=3, reduction_factor=2.0))
def told(name, loss):
    trial = SimpleNamespace(trial_id=name, config={"kv_ratio": 0.5}, status="RUNNING")
    return scheduler.on_trial_result(None, trial, {"rung": 0, "loss": loss, "kv_bytes_per_token": 64})
assert [told("a", 2.0), told("b", 3.0), told("c", 1.0), told("d", 2.5)] == ["CONTINUE", "STOP", "CONTINUE", "STOP"]
""",
}


# A process forks one for each example, so that they share what takes long to import and nothing of this project.
# `{folder: program}` comes by its input; the folder comes first on the path, before the installed project.
EACH = """
import json, os, sys, traceback
import torch
from transformers import ArceeForCausalLM, LlamaForCausalLM

assert not {"attention", "search_spaces", "trainers", "orchestrator"} & sys.modules.keys()
found = {}
for folder, program in json.load(sys.stdin).items():
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with open(os.path.join(folder, "told.txt")) as file:
            found[folder] = code, file.read()
        continue
    os.chdir(folder)
    with open("told.txt", "w", buffering=1) as told:
        sys.stdout = sys.stderr = told
        sys.path[0] = folder
        code = 1
        try:
            exec(compile(program, "example", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
    os._exit(code)
print(json.dumps(found))
"""


def _folder_with(name: str, folder: Path) -> Path:
    """A copy of the project with an example in it, and Python's bytecode: it is valid there too."""
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, folder / package)
    code = (EXTENDING / name).read_text()
    place = re.search(r"Its place: ([\w/]+\.py)\.", code)
    assert place, f"{name} does not say where it belongs"
    assert not (folder / place[1]).exists()
    (folder / place[1]).write_text(code)
    return folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and output of each example's use, in a copy of the project that has this example alone."""
    folders = {name: _folder_with(name, tmp_path_factory.mktemp(Path(name).stem)) for name in USES}
    requested = {str(folders[name]): MODEL + use for name, use in USES.items()}
    done = subprocess.run([sys.executable, "-c", EACH], input=json.dumps(requested), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    return {name: result[str(folder)] for name, folder in folders.items()}


def test_every_example_is_on_the_page_and_used_here() -> None:
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    names = {path.name for path in EXTENDING.glob("*.py")}
    assert names == USES.keys() and all(f"(examples/extending/{name})" in page for name in names)


@pytest.mark.extended
@pytest.mark.parametrize("name", USES)
def test_example_is_one_file_and_works(name: str, ran: dict[str, tuple[int, str]]) -> None:
    code, report = ran[name]
    assert code == 0, report
