"""Checks against the checkpoint, the texts, the storage and the cluster before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.schema import ConfigError, parse_config, read_search_config
from orchestrator.search.setup import SearchSetup
from orchestrator.search.validation import check_epochs, check_gpus, validate_search
from orchestrator.storage.paths import SearchFolder, storage_path
from orchestrator.tasks.search import split_overrides
from trainers.text.token_sets import is_complete

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SMALL = {"sequence_length": 32, "train": {"tokens": 640}, "eval": {"tokens": 320}, "calibration": {"tokens": 320}}


def record(demo_dir: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "small",
        "model": {"path": str(demo_dir)},
        "data": SMALL,
        "search": {"recipes": ["gqa", "headfold"], "kv_ratios": [0.5, 0.25], "searcher": "grid"},
        "storage": str(folder),
    }
    return {
        key: {**base.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in {**base, **sections}.items()
    }


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        validate_search(parse_config(config))
    return str(caught.value)


def arm(**fields: Any) -> dict[str, Any]:
    """A search of the baseline and one more arm."""
    return {"search": {"recipes": ["least_squares", fields], "kv_ratios": [0.25]}}


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"search": {"kv_ratios": [0.3], "strict": True}}, ["search.kv_ratios", "0.3", "gqa", "0.25"]),
        ({"search": {"recipes": ["gqa", "dha9"]}}, ["search.recipes", "dha9", "headfold"]),
        ({"search": {"baseline": "none"}}, ["search.baseline", "none", "gqa"]),
        (arm(recipe="dha", changes={"fusion": "least_squares"}), ["search.recipes", "dha", "fusion", "mean"]),
        (arm(recipe="gqa", params={"relaxation.rate": 1}), ["search.recipes", "gqa", "relaxation=none", "rate"]),
        (arm(recipe="postshare", label="mine"), ["search.kv_ratios", "0.25", "mine", "saves weights", "1"]),
        (arm(recipe="align", changes={"composition": "dcmha"}), ["align", "composition must be none", "dcmha"]),
        (arm(recipe="align") | {"train": {"teacher_logits": "cached"}}, ["search.recipes", "align", "kl_bild", "live"]),
        (
            {
                "search": {"searcher": "random", "num_samples": 2, "params": {"relaxation.steps": 10**6}}
                | {"search_space": {"relaxation": ["none", "lagrangian"]}}
            },
            ["search.params: relaxation.steps", "rungs.steps", "1000000"],
        ),
        (
            arm(recipe="dha", params={"relaxation.batch_size": 6}) | {"train": {"micro_batch_size": 4}},
            ["search.recipes: dha", "relaxation", "6", "micro_batch_size", "4"],
        ),
        (
            {
                "search": {"searcher": "random", "num_samples": 2, "params": {"relaxation.batch_size": 6}}
                | {"search_space": {"relaxation": ["none", "lagrangian"]}},
                "train": {"micro_batch_size": 4},
            },
            ["search.params", "relaxation", "6", "micro_batch_size", "4"],
        ),
        (arm(recipe="gqa", budget=[1.0]), ["search.recipes.1.budget", "kv_ratios", "params"]),
        ({"model": {"teacher": "/no/such/teacher"}}, ["model.teacher", "/no/such/teacher"]),
        ({"search": {"searcher": "grids"}}, ["search.searcher", "grids", "optuna"]),
        ({"rungs": {"scheduler": "fronts"}}, ["rungs.scheduler", "fronts", "front"]),
        ({"rungs": {"scheduler": "front", "params": {"ties": "first"}}}, ["rungs.params", "ties", "crowding"]),
        ({"rungs": {"params": {"ties": "crowding"}}}, ["rungs.params", "asha", "ties"]),
        ({"search": {"num_samples": 3}}, ["search.num_samples", "3", "optuna or random"]),
        ({"search": {"search_space": {"grouping": ["exactly"]}}}, ["search.search_space", "exactly", "exact"]),
        ({"search": {"search_space": {"groping": ["exact"]}}}, ["search.search_space", "groping"]),
        ({"data": {"sequence_length": 4096}}, ["sequence_length", "4096", "512"]),
        ({"data": {"source": "/no/such/file.txt"}}, ["data.train", "/no/such/file.txt"]),
        ({"data": {"source": "nobody/no-such-data-set"}}, ["data.train", "nobody/no-such-data-set"]),
        ({"data": {"eval": {"tokens": 10**9}}}, ["data.eval", "builtin", "fewer tokens"]),
        ({"model": {"path": "/no/such/model"}}, ["model.path", "/no/such/model", "config.json"]),
        ({"model": {"path": "nobody/no-such-model"}}, ["model.path", "nobody/no-such-model"]),
        ({"storage": "s33://bucket/runs"}, ["storage", "s33://bucket/runs", "folder"]),
        ({"storage": "s3://key:hidden@bucket/runs"}, ["storage", "s3://bucket/runs", "credentials"]),
        ({"storage": "s3:///runs"}, ["storage", "bucket"]),
        ({"storage": "/proc/headfold"}, ["storage", "/proc/headfold", "can be written"]),
    ],
)
def test_bad_input_is_refused_naming_key_value_and_remedy(
    demo_dir: Path, tmp_path: Path, sections: dict[str, Any], text: list[str]
) -> None:
    message = refusal(record(demo_dir, tmp_path, **sections))
    for word in text:
        assert word in message
    assert not list(tmp_path.glob("small*")), "nothing of the search may exist after a refusal"


def test_empty_text_is_refused(demo_dir: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    message = refusal(record(demo_dir, tmp_path, data={"source": str(empty)}))
    assert "data.train" in message
    assert str(empty) in message


def test_an_unsupported_family_is_refused_with_the_supported_ones(demo_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "bert"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "bert"}))
    message = refusal(record(demo_dir, tmp_path, model={"path": str(other)}))
    assert "model.path" in message
    assert "bert" in message
    assert "llama" in message


def test_a_checkpoint_without_safetensors_is_refused(demo_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(demo_dir / "config.json", bare)
    message = refusal(record(demo_dir, tmp_path, model={"path": str(bare)}))
    assert "model.path" in message
    assert "safetensors" in message


def test_a_checkpoint_without_tokenizer_is_refused(demo_dir: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(demo_dir, bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in refusal(record(demo_dir, tmp_path, model={"path": str(bare)}))


def test_a_sound_configuration_gives_candidates_and_token_files(
    demo_dir: Path, tmp_path: Path, little_text: str
) -> None:
    settings = {"data": SMALL | {"source": little_text}}
    prepared = validate_search(parse_config(record(demo_dir, tmp_path, **settings)))
    names = [(c.recipe.name, c.kv_ratio) for c in prepared.problem.named]
    assert names == [("gqa", 0.5), ("gqa", 0.25), ("headfold", 0.5), ("headfold", 0.25)]
    assert set(prepared.files) == {"train", "eval", "calibration", "test"} and len(set(prepared.files.values())) == 4
    assert all(map(is_complete, prepared.files.values()))
    assert prepared.reused == ()
    again = validate_search(parse_config(record(demo_dir, tmp_path, search={"seed": 1}, **settings)))
    assert again.reused == ("eval", "test"), "held-out text is the same whatever the seed"
    assert validate_search(parse_config(record(demo_dir, tmp_path, **settings))).reused == (
        "train",
        "eval",
        "calibration",
        "test",
    )


def test_a_text_is_trained_on_once_unless_more_is_requested(demo_dir: Path, tmp_path: Path) -> None:
    def check(steps: int, promoted: int, **data: Any) -> None:
        sections = {"rungs": {"steps": [0, steps]}, "promotion": {"steps": promoted}, "data": SMALL | data}
        check_epochs(parse_config(record(demo_dir, tmp_path, **sections)))

    check(2, 0)  # 16 of 20 sequences
    check(2, 1, max_epochs=1.2)  # 24
    for steps, promoted, keys in ((3, 0, "rungs.steps"), (2, 1, "rungs.steps and promotion.steps")):
        with pytest.raises(ConfigError) as caught:
            check(steps, promoted)
        assert str(caught.value) == (
            f"data.train.tokens: {keys} (train.batch_size sequences of data.sequence_length 32 a step) "
            "take 768 tokens, 1.2 times the 640 of the text; set data.train.tokens to 768, or "
            "data.max_epochs to 2 to train on the same text again"
        )
    check(3, 0, train={"tokens": 768})
    check(3, 0, max_epochs=2)


def test_a_relaxation_with_a_larger_batch_counts_in_what_is_read(demo_dir: Path, tmp_path: Path) -> None:
    """Of 4 steps the relaxation takes 2, of 16 sequences instead of 8: 48 of the 40 that there are."""
    arms = [{"recipe": "dha", "params": {"relaxation.batch_size": 16, "relaxation.fraction": 0.5}}]
    sections = {
        "data": SMALL | {"train": {"tokens": 40 * 32}},
        "search": {"recipes": arms, "kv_ratios": [0.5]},
        "rungs": {"steps": [0, 4]},
        "promotion": {"enabled": False},
    }
    config = parse_config(record(demo_dir, tmp_path, **sections))
    setup = SearchSetup.open(config)
    check_epochs(config)
    with pytest.raises(ConfigError, match="relaxation.batch_size of search.recipes.* take 1536 tokens") as caught:
        check_epochs(config, (candidate.recipe for candidate in setup.problem.named))
    assert "set data.train.tokens to 1536" in str(caught.value)
    arms[0]["params"].pop("relaxation.batch_size")
    alike = SearchSetup.open(parse_config(record(demo_dir, tmp_path, **sections)))
    assert setup.work.tokens - alike.work.tokens == 2 * 8 * 32, "the estimate counts them"


@pytest.mark.parametrize("config", sorted(CONFIGS.rglob("*.yaml")), ids=lambda file: file.stem)
def test_no_configuration_of_ours_sees_a_text_twice_unasked(config: Path) -> None:
    check_epochs(read_search_config(config))


def test_gpus_that_a_worker_would_leave_idle_are_refused(demo_dir: Path, tmp_path: Path) -> None:
    """DeepSpeed takes GPU number LOCAL_RANK, whichever GPU Ray has given the worker."""

    def check(**sections: Any) -> None:
        check_gpus(parse_config(record(demo_dir, tmp_path, data=SMALL, **sections)))

    two = {"gpus_per_worker": 2, "num_workers": 2}
    check(train={"gpus_per_worker": 1, "num_workers": 2})
    check(train={"gpus_per_worker": 0.5})
    check(promotion={"steps": 0, "train": two})
    for key, sections in (
        ("train", {"train": two}),
        ("promotion.train", {"promotion": {"steps": 1, "train": two}}),
    ):
        with pytest.raises(ConfigError) as caught:
            check(**sections)
        assert str(caught.value) == (
            f"{key}.gpus_per_worker: a worker computes on one GPU, got 2, of which the others would be idle; set it "
            "to 1 and num_workers to 4"
        )


# ---- folders ----------------------------------------------------------------------------------------------------


def test_relative_storage_of_a_ray_job_goes_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert storage_path("runs") == tmp_path / "runs"
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setenv("HEADFOLD_HOME", str(tmp_path / "home"))
    assert storage_path("runs") == tmp_path / "home" / "runs"
    assert storage_path("/data/runs") == Path("/data/runs")
    assert storage_path("file:///data/runs") == Path("/data/runs")


def test_a_second_search_of_one_name_gets_a_separate_folder(tmp_path: Path) -> None:
    first, second = SearchFolder.fresh(tmp_path, "demo"), SearchFolder.fresh(tmp_path, "demo")
    SearchFolder.fresh(tmp_path, "demo-x")
    assert (first.root.name, second.root.name) == ("demo", "demo-2")
    first.snapshot.write_text("")
    second.snapshot.write_text("")
    (tmp_path / "demo-x" / "search.yaml").write_text("")
    assert SearchFolder.newest(tmp_path, "demo").root in (first.root, second.root)
    with pytest.raises(ConfigError, match="no search named 'other'"):
        SearchFolder.newest(tmp_path, "other")


def test_any_search_of_a_storage_can_be_resumed_by_name_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = [SearchFolder.fresh(tmp_path / "runs", "demo") for _ in range(3)]
    for folder in created:
        folder.snapshot.write_text("")
    created[2].state.write_text('{"ended": "done"}')
    assert SearchFolder.unended(tmp_path / "runs", "demo") == created[:2]
    monkeypatch.chdir(tmp_path)
    for given in ("demo-2", "runs/demo-2", "runs/demo-2/", str(created[1].root)):
        assert SearchFolder.named(tmp_path / "runs", given) == created[1]
    elsewhere = SearchFolder.fresh(tmp_path / "others", "demo-7")
    elsewhere.snapshot.write_text("")
    for given in ("demo-9", str(elsewhere.root), "..", ""):
        with pytest.raises(ConfigError, match=f"no search '{given}' in .*; unfinished: demo, demo-2; finished: demo-3"):
            SearchFolder.named(tmp_path / "runs", given)
    with pytest.raises(ConfigError, match="there is none at all; start one without --resume"):
        SearchFolder.named(tmp_path / "empty", "demo")


@pytest.mark.parametrize(
    ("words", "resume", "expected"),
    [
        (["a.b=1"], True, (["a.b=1"], None)),
        (["a.b=1", "demo-2"], True, (["a.b=1"], "demo-2")),
        (["demo-2"], False, (["demo-2"], None)),  # refused as an override
    ],
)
def test_the_name_after_resume_is_distinguished_from_overrides(
    words: list[str], resume: bool, expected: tuple[list[str], str | None]
) -> None:
    assert split_overrides(words, resume) == expected


def test_two_names_to_resume_are_refused() -> None:
    with pytest.raises(ConfigError, match="--resume: got the names a and b; give one"):
        split_overrides(["a", "x=1", "b"], True)


def test_a_folder_of_no_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the folder of a search"):
        SearchFolder.existing(tmp_path)
