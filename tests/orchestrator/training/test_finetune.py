"""The verb finetune: refusals before any work, real trainings of converted and stock checkpoints, and resuming."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run_here
from parameters import extended
from safetensors.torch import load_file, save_file
from verbs import check_finetuning, evaluate_checkpoint, finetune_checkpoint

from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.config.schema import ConfigError
from orchestrator.tasks.finetune import FinetuneRequest, _tensors
from orchestrator.tracking.runs import default_uri, open_client
from trainers.text.data import write_sequences

UNEVEN = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)), LayerPlan((0, 1, 2, 3), (0, 0, 0, 0))), head_dim=8)
ASKED: dict[str, Any] = {
    "steps": 12,
    "eval_every": 4,
    "learning_rate": 3e-3,
    "eval_tokens": 1024,
    "sequence_length": 32,
    "device": "cpu",
    "overrides": ["train.cpus_per_worker=0.4"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Any, demo_tokenizer: Any) -> dict[str, Path]:
    """A stock checkpoint in bfloat16, and what a conversion makes of it."""
    folder = tmp_path_factory.mktemp("models")
    stock = tiny_model("llama", vocab_size=2048).to(torch.bfloat16)
    stock.save_pretrained(folder / "stock")
    demo_tokenizer.save_pretrained(folder / "stock")
    checkpoint.save(convert(stock, UNEVEN), folder / "converted", folder / "stock")
    return {name: folder / name for name in ("stock", "converted")}


@pytest.fixture(scope="module")
def whole(
    ray_cluster: None, models: dict[str, Path], empty_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The converted model, learning from the stock one: its record, its folder `out`, and its output lines `told`."""
    out, report = tmp_path_factory.mktemp("whole") / "out", list[str]()
    more = {"original": models["stock"], "progress": report.append}
    store = default_uri(out.parent)
    shutil.copy(empty_store, store.removeprefix("sqlite:///"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", store)
        record = finetune_checkpoint(models["converted"], out, **more, **ASKED)
    return {"record": record, "out": out, "told": report, "store": store}


def test_the_best_step_is_kept_in_the_dtype_of_the_model(whole: dict[str, Any], models: dict[str, Path]) -> None:
    record, out = whole["record"], whole["out"]
    assert [point["step"] for point in record["milestones"]] == [4, 8, 12]
    assert record["loss"] == min(point["loss"] for point in record["milestones"]) < record["loss_before"]
    assert record["better"]
    assert record["kl"] is not None
    model = checkpoint.load(out)
    assert model.dtype == torch.bfloat16
    assert plan_of(model).layers == UNEVEN.layers
    measured = evaluate_checkpoint(out, eval_tokens=1024, sequence_length=32, speed_tokens=4)
    assert measured["loss"] == pytest.approx(record["loss"], abs=2e-2)  # rounded to bfloat16
    before = evaluate_checkpoint(models["converted"], eval_tokens=1024, sequence_length=32, speed_tokens=4)
    assert before["loss"] == pytest.approx(record["loss_before"], abs=1e-4)
    assert "training: 8 of 12 steps, " in whole["told"][2]


def test_its_run_is_in_the_mlflow_store_that_the_environment_names(whole: dict[str, Any]) -> None:
    client, record = open_client(whole["store"]), whole["record"]
    (run,) = client.search_runs([client.get_experiment_by_name("headfold").experiment_id])
    assert (run.info.run_name, run.info.status) == ("out · all weights of converted", "FINISHED")
    losses = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "eval_loss")]
    measured = [(0, record["loss_before"]), *((point["step"], point["loss"]) for point in record["milestones"])]
    assert sorted(losses) == [(step, pytest.approx(loss)) for step, loss in measured]
    assert {"train_loss", "perplexity", "eval_kl", "tokens_per_second", "learning_rate", "grad_norm"} <= {
        *run.data.metrics
    }
    assert run.data.metrics["kv_bytes_per_token"] == UNEVEN.kv_bytes_per_token(torch.bfloat16)
    params = {"base_model": "converted", "tuning": "full", "steps": "12", "seed": "0", "learning_rate": "0.003"}
    assert params.items() <= run.data.params.items() and "batch_size" in run.data.params
    assert {created.dataset.name for created in run.inputs.dataset_inputs} == {"train: builtin", "eval: builtin"}
    assert str(whole["out"]) in run.data.tags["mlflow.note.content"]
    assert run.data.tags["mlflow.source.name"] == "headfold finetune"


@pytest.mark.extended
def test_the_same_command_does_nothing_twice(whole: dict[str, Any], models: dict[str, Path]) -> None:
    out, requested = whole["out"], ASKED | {"original": models["stock"]}
    written = (out / "model.safetensors").stat().st_mtime_ns
    assert finetune_checkpoint(models["converted"], out, **requested) == whole["record"]
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="holds a training with another settings, original"):
        finetune_checkpoint(models["converted"], out, **ASKED)
    text = (out / "config.json").read_text()
    (out / "model.safetensors").unlink()  # the weights were lost: made again from the best step
    checkpoint.write_digests(out)
    again = finetune_checkpoint(models["converted"], out, **requested)
    assert again["weights_digest"] == whole["record"]["weights_digest"]
    assert (out / "config.json").read_text() == text


@pytest.mark.extended
def test_with_zero_3_the_workers_measure_the_loss_before_together(
    ray_cluster: None, models: dict[str, Path], tmp_path: Path
) -> None:
    """One worker may have no room for the whole model."""
    eval_file = tmp_path / "eval"
    sequences = torch.randint(2048, (5, 32), generator=torch.Generator().manual_seed(0))
    write_sequences(sequences, eval_file, largest_id=2047)
    starts = {}
    for zero_stage in (1, 3):
        overrides = [*ASKED["overrides"], "train.num_workers=2", f"train.zero_stage={zero_stage}"]
        out = tmp_path / str(zero_stage)
        request = check_finetuning(models["converted"], out, **ASKED | {"overrides": overrides})
        starts[zero_stage] = request.prepare(eval_file)
    assert starts[3]["parameters"] == starts[1]["parameters"] > 0
    assert starts[3]["loss_before"] == pytest.approx(starts[1]["loss_before"], abs=1e-5)


@pytest.mark.parametrize("tuning", [extended("kv"), extended("lora")])
def test_a_part_of_the_weights_on_the_command_line(
    ray_cluster: None, models: dict[str, Path], tmp_path: Path, tuning: str
) -> None:
    out, numbers = tmp_path / "out", tmp_path / "numbers.json"
    sizes = ["--steps", "2", "--learning-rate", "1e-3", "--eval-tokens", "1024", "--sequence-length", "32"]
    more = ["--device", "cpu", "--set", "train.cpus_per_worker=0.4", "--tuning", tuning, "--json", numbers]
    assert run_here("finetune", "--model", models["stock"], "--out", out, *sizes, *more) in (0, None)
    record = json.loads(numbers.read_text())
    assert record["settings"]["tuning"] == tuning
    now, then = (checkpoint.load(folder).state_dict() for folder in (out, models["stock"]))
    moved = {name for name in then if not torch.equal(now[name], then[name])}
    layers = [name for name in moved if "layers." in name]
    assert layers
    assert set(layers) == moved
    if tuning == "kv":
        assert all("k_proj" in name or "v_proj" in name for name in layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tuning": "some"}, "train.tuning: got 'some'"),
        ({"overrides": ["train.tuning=kv"]}, "train.tuning: it has its own option; give it as --tuning"),
        ({"overrides": ["train.distillation=kl"]}, "train.distillation: it needs the original model.*--original"),
        ({"original": "/none"}, "original: no checkpoint at '/none'"),
        ({"steps": 0}, "steps: got 0"),
        ({"sequence_length": 1000}, "sequence_length: got 1000"),
        ({"overrides": ["composition.rank=2"]}, "composition: unknown key"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    models: dict[str, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_finetuning(models["stock"], tmp_path / "out", **{**ASKED, **changes})
    assert not list(tmp_path.iterdir())


def test_what_chooses_experts_is_not_rounded(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("glm4_moe")
    (name, bias), *_ = (item for item in model.named_buffers() if item[0].endswith("e_score_correction_bias"))
    bias.copy_(torch.linspace(0.1, 0.2, len(bias)))
    checkpoint.save(model, tmp_path)
    written = dict(_tensors(tmp_path, torch.bfloat16))
    assert torch.equal(written[name], bias)
    assert written["model.norm.weight"].dtype == torch.bfloat16


def test_with_an_original_the_loss_is_its_divergence_at_a_separate_rate(
    models: dict[str, Path], tmp_path: Path
) -> None:
    options = {name: value for name, value in ASKED.items() if name != "learning_rate"}
    out = tmp_path / "out"
    learning = {**options, "original": models["stock"]}
    settings = check_finetuning(models["converted"], out, **learning).settings
    assert (settings.distillation, settings.distillation_weight, settings.learning_rate) == ("kl", 1.0, 1e-4)
    named = {**learning, "overrides": ["train.distillation=kl_bild"]}
    settings = check_finetuning(models["converted"], out, **named).settings
    assert (settings.distillation, settings.distillation_weight) == ("kl_bild", 0.5)
    with pytest.raises(ConfigError, match="learning_rate: expected --learning-rate, or --original"):
        check_finetuning(models["converted"], out, **options)


def test_a_training_that_was_begun_with_half_of_the_divergence_resumes_with_it(
    models: dict[str, Path], tmp_path: Path
) -> None:
    out, given = tmp_path / "out", {**ASKED, "original": models["stock"]}
    former = {"overrides": [*ASKED["overrides"], "train.distillation_weight=0.5"]}
    check_finetuning(models["converted"], out, **{**given, **former}).note()
    assert check_finetuning(models["converted"], out, **given).settings.distillation_weight == 0.5
    another = {"overrides": [*ASKED["overrides"], "train.distillation_weight=1.0"]}
    with pytest.raises(ConfigError, match="holds a training with another settings"):
        check_finetuning(models["converted"], out, **{**given, **another})


def test_a_training_alone_on_a_machine_has_all_its_cpus_and_continues_with_others(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.tasks.training.starts_ray", lambda: True)
    monkeypatch.setattr("orchestrator.cluster.ray_internals.get_num_cpus", lambda: 6)
    out, given = tmp_path / "out", {**ASKED, "overrides": []}
    request = check_finetuning(models["converted"], out, **given)
    assert (request.settings.cpus_per_worker, request.settings.threads) == (6, 6)
    request.note()
    two = {**given, "overrides": ["train.num_workers=2"]}
    assert check_finetuning(models["converted"], tmp_path / "two", **two).settings.cpus_per_worker == 3
    twelve = {**given, "overrides": ["train.num_workers=12", "train.batch_size=12"]}  # one at least: they do not fit
    assert check_finetuning(models["converted"], tmp_path / "twelve", **twelve).settings.cpus_per_worker == 1
    assert check_finetuning(models["converted"], out, **ASKED).settings.cpus_per_worker == 0.4
    monkeypatch.setattr("orchestrator.tasks.training.starts_ray", lambda: False)  # of a cluster only what is set
    assert check_finetuning(models["converted"], out, **given).settings.cpus_per_worker == 1


def test_a_training_of_other_weights_or_another_text_is_not_continued(
    models: dict[str, Path], little_text: str, tmp_path: Path
) -> None:
    model, text, out = tmp_path / "model", tmp_path / "texts.jsonl", tmp_path / "out"
    shutil.copytree(models["stock"], model)
    shutil.copy(little_text, text)
    requested = ASKED | {"train_data": str(text)}
    request = check_finetuning(model, out, **requested)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FinetuneRequest, "prepare", lambda *_: {"parameters": 1, "folder": str(model), "teacher": None})
        request.make_job()
        check_finetuning(model, out, **requested).make_job()  # the same again continues
        with text.open("a") as stream:
            stream.write(json.dumps({"text": "a new document " * 9000}) + "\n")
        changed = check_finetuning(model, out, **requested)  # a file may be newer, and its text the same
        with pytest.raises(ConfigError, match="holds a training whose text has changed"):
            changed.make_job()
    weights = load_file(model / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="holds a training whose model has changed"):
        check_finetuning(model, out, **requested)


def test_a_finished_training_is_of_its_model_and_its_texts(
    models: dict[str, Path], little_text: str, tmp_path: Path
) -> None:
    text, out = tmp_path / "texts.jsonl", tmp_path / "out"
    shutil.copy(little_text, text)
    requested = ASKED | {"train_data": str(text)}
    request = check_finetuning(models["stock"], out, **requested)
    request.note(inputs=request._inputs(), finished=True, weights_digest=checkpoint.weights_digest(models["stock"]))
    shutil.copytree(models["stock"], out)
    assert check_finetuning(models["stock"], out, **requested).finished
    text.write_text(text.read_text() + json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ConfigError, match="holds a training whose train_data, eval_data has changed"):
        check_finetuning(models["stock"], out, **requested)


def test_what_it_would_write_over_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    with pytest.raises(ValueError, match="Headfold did not write its 'mine.txt'"):
        finetune_checkpoint(models["stock"], tmp_path / "out", **ASKED)
    with pytest.raises(ValueError, match="out: "):
        finetune_checkpoint(models["stock"], models["stock"], overwrite=True, **ASKED)
