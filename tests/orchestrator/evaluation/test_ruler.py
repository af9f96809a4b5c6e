"""Generated long-context tasks: by their definitions, in lengths, and on the demo checkpoint."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel

from orchestrator.config.schema import ConfigError
from orchestrator.evaluation import ruler
from orchestrator.evaluation.ruler import RULER_TASKS, ruler_configs, samples, string_match
from orchestrator.evaluation.tasks import HarnessTasks

LENGTH = 1024
GENERATED = {"ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50}
# Values of a key, queried keys, hidden keys
NEEDLES = {
    "ruler_niah_single_1": (1, 1, 1),
    "ruler_niah_single_3": (1, 1, 1),
    "ruler_niah_multikey_1": (1, 1, 4),
    "ruler_niah_multikey_2": (1, 1, None),
    "ruler_niah_multikey_3": (1, 1, None),
    "ruler_niah_multivalue": (4, 1, 1),
    "ruler_niah_multiquery": (1, 4, 4),
}


@pytest.mark.parametrize("name", RULER_TASKS)
def test_documents_fill_the_length_and_depend_on_the_seed_alone(name: str, demo_tokenizer: Any) -> None:
    for length in (LENGTH, 2 * LENGTH):
        documents = samples(name, demo_tokenizer, length, count=4, seed=3)
        sizes = [len(demo_tokenizer.encode(document["prompt"])) + GENERATED.get(name, 128) for document in documents]
        assert max(sizes) <= length
        assert min(sizes) > 0.85 * length
        assert documents == samples(name, demo_tokenizer, length, count=4, seed=3)
        assert documents != samples(name, demo_tokenizer, length, count=4, seed=4)


@pytest.mark.parametrize(("name", "counts"), NEEDLES.items())
def test_each_needle_is_hidden_once_and_those_of_the_queried_keys_are_the_answer(
    name: str, counts: tuple[int, int, int | None], demo_tokenizer: Any
) -> None:
    values, queries, keys = counts
    for document in samples(name, demo_tokenizer, LENGTH, count=5):
        text = document["prompt"]
        hidden = re.findall(r"^The secret (?:number|uuid) for (\S+) is (\S+)\.$", text, re.MULTILINE)
        if keys is not None:
            assert len(hidden) == keys * values
            assert len({key for key, _ in hidden}) == keys
        else:
            assert len(hidden) == len({key for key, _ in hidden}) > 8
        assert len(document["answers"]) == values * queries == len(set(document["answers"]))
        question = text.rpartition("Which secret")[2]
        asked = {key for key, _ in hidden if key in question}
        assert len(asked) == queries
        assert {value for key, value in hidden if key in asked} == set(document["answers"])
        for answer in document["answers"]:
            assert text.count(answer) == 1
            assert re.fullmatch(r"\d{7}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", answer)


def test_variables_are_one_chain_in_order_that_an_example_precedes(demo_tokenizer: Any) -> None:
    for document in samples("ruler_vt", demo_tokenizer, LENGTH, count=5):
        text = document["prompt"].rpartition("The text below")[2]
        assert document["prompt"].count("The text below") == 2
        value = re.search(r"which variables have the value (\d{5})\?", text)
        assert value
        known = set()
        for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", text, re.MULTILINE):
            assert source == value[1] or source in known  # what it is assigned stands before
            known.add(name)
        assert known == set(document["answers"])
        assert len(known) == 5


@pytest.mark.parametrize(("length", "common", "others"), [(LENGTH, 6, 1), (4096, 30, 3)])
def test_ten_words_are_common(length: int, common: int, others: int, demo_tokenizer: Any) -> None:
    for document in samples("ruler_cwe", demo_tokenizer, length, count=2):
        listed = document["prompt"].rpartition("Some words")[2].partition("Question")[0]
        counts = Counter(re.findall(r"\d+\. (\S+)", listed))
        assert sorted(document["answers"]) == sorted(word for word, count in counts.items() if count == common)
        assert len(document["answers"]) == 10
        assert {count for word, count in counts.items() if word not in document["answers"]} == {others}


def test_three_coded_words_are_the_most_frequent_after_the_dots(demo_tokenizer: Any) -> None:
    for document in samples("ruler_fwe", demo_tokenizer, LENGTH, count=5):
        coded = document["prompt"].partition("Count each. ")[2].partition("\n")[0]
        ranked = Counter(coded.split()).most_common()
        assert [word for word, _ in ranked[:4]] == ["...", *document["answers"]]
        counts = [count for _, count in ranked]
        assert counts[3] > counts[4]
        assert counts[1] / counts[0] == pytest.approx(1 / 4, abs=0.05)  # the zeta distribution of alpha 2


def test_a_score_is_the_share_of_the_answers_in_the_text() -> None:
    assert string_match("They are ABC, def.", ["abc", "DEF"]) == 1
    assert string_match("abc alone", ["abc", "def"]) == 0.5
    assert string_match("", ["abc"]) == 0


@pytest.mark.parametrize("name", RULER_TASKS)
def test_an_oracle_scores_1_and_another_documents_answer_0(name: str, demo_tokenizer: Any) -> None:
    [config] = ruler_configs([name], demo_tokenizer, [LENGTH])
    documents = list(config["custom_dataset"]()["test"])
    assert len(documents) == 100
    for document, other in zip(documents[:20], documents[20:40], strict=True):
        assert config["process_results"](document, [" " + ", ".join(document["answers"])]) == {"string_match": 1.0}
        if name != "ruler_cwe":  # whose words come from one list
            assert config["process_results"](document, [" ".join(other["answers"])]) == {"string_match": 0.0}
        assert config["process_results"](document, ["I do not know."]) == {"string_match": 0.0}


@pytest.mark.parametrize("name", ["ruler_niah_multikey_2", "ruler_cwe"])
def test_a_task_whose_words_do_not_suffice_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ruler, "_COMPOUNDS", ruler._COMPOUNDS[:600])
    words: Any = SimpleNamespace(encode=str.split)
    with pytest.raises(ConfigError, match=rf"{name} has not enough text for contexts of 1000000 tokens"):
        samples(name, words, 1_000_000, count=1)


def test_what_does_not_fit_or_is_unknown_is_refused_with_what_to_do(demo_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"ruler_cwe needs contexts of at least \d+ tokens .* got 256"):
        HarnessTasks(["ruler_cwe"], demo_tokenizer, [256])
    with pytest.raises(ConfigError, match="add --context-lengths"):
        HarnessTasks(["ruler_vt"], demo_tokenizer)
    with pytest.raises(ConfigError, match="no 'ruler_qa_1'; there are ruler_niah_single_1"):
        HarnessTasks(["ruler_qa_1"], demo_tokenizer, [512])


@pytest.mark.extended
def test_the_harness_runs_them_on_the_demo_checkpoint(
    demo_model: PreTrainedModel, demo_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.evaluation.ruler.samples.__kwdefaults__", {"count": 3, "seed": 0})
    tasks = HarnessTasks(["ruler_vt", "ruler_fwe"], demo_tokenizer, [400, 512])
    scores = tasks.scores(demo_model, demo_tokenizer)
    assert set(scores) == {f"ruler_{name}_{length}" for name in ("vt", "fwe") for length in (400, 512)}
    for score in scores.values():
        assert score["items"] == 3
        assert 0 <= score["string_match"] <= 1
