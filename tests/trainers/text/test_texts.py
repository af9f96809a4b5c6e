"""One text or two, the first tokens of sequences, and conversations."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainers.text import data
from trainers.text.corpora import DataError, is_held_out, resolve
from trainers.text.data import TextCut, Texts, default_length, load_sequences, token_set
from trainers.text.token_sets import read_sequences
from trainers.text.tokenising import beginning, tokenise

WORDS = ("of", "the", "model", "that", "is", "read", "when", "a", "text", "was", "cut", "into", "parts", "by", "us")
BEGINNING = 2047  # of `chat_tokenizer`


def document(number: int, words: int = 250) -> str:
    return f"document {number}: " + " ".join(WORDS[(number * k) % 97 % len(WORDS)] for k in range(words))


def write(file: Path, texts: list[str], field: str = "text") -> str:
    file.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(file)


def all_documents(source: str, side: Any, division: Any) -> list[str]:
    return list(resolve(source).documents(side, "text", None, division))


def test_twenty_documents_are_enough_to_calibrate_and_to_measure_on(tmp_path: Path, demo_tokenizer: Any) -> None:
    texts = [document(n) for n in range(20)]
    source = write(tmp_path / "texts.jsonl", texts)
    kept, rest = (all_documents(source, side, "by_size") for side in ("held_out", "train"))
    assert sorted(kept + rest) == sorted(texts)
    assert 4 <= len(kept) <= 7  # a quarter of the text
    assert {text for text in texts if is_held_out(text)} <= set(kept)
    assert kept == all_documents(source, "held_out", "by_size")  # the same in any process: by digest
    loaded = Texts(source).load(demo_tokenizer, 512)
    assert len(loaded.held_out) >= data.FEWEST
    assert loaded.held_out.shape[1] == loaded.facts["sequence_length"] < 512
    assert loaded.facts["calibration_data"] == loaded.facts["eval_data"] == source
    shown = demo_tokenizer.decode(loaded.held_out.flatten().tolist())
    assert not any(f"document {n}:" in shown for n in range(20) if texts[n] in rest)


def test_much_text_is_divided_by_the_digest_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "texts.jsonl", [document(n, 2000) for n in range(400)])
    assert all_documents(source, "held_out", "by_size") == all_documents(source, "held_out", "twentieth")


def test_lines_of_spaces_alone_divide_a_text_file_too(tmp_path: Path) -> None:
    """The text of WikiText has a space in each of its blank lines."""
    file = tmp_path / "wiki.txt"
    file.write_text(" \n = Title = \n \n first line\nsecond line\n \n\n last \n", encoding="utf-8")
    paragraphs = [" = Title = ", " first line\nsecond line", " last "]
    assert list(resolve(str(file)).documents("all", "text", None)) == paragraphs
    sides = [list(resolve(str(file)).documents(side, "text", 0, "by_size")) for side in ("train", "held_out")]
    assert all(sides) and sorted([*sides[0], *sides[1]]) == sorted(paragraphs)
    assert len(list(resolve(str(file)).documents("all", "text", None, "whole"))) == 2, "cut at the empty line alone"


def test_another_text_to_measure_on_is_used_whole_less_what_both_have(tmp_path: Path, demo_tokenizer: Any) -> None:
    calibration = write(tmp_path / "calibration.jsonl", [document(n) for n in range(20)])
    other = write(tmp_path / "other.jsonl", [document(n) for n in range(15, 35)])
    texts = Texts(calibration, other)
    cut = texts.cut("eval", 100, 50)
    pooled = cut.pooled(demo_tokenizer)
    assert (pooled.documents, pooled.left_out) == (15, 5)
    expected = tokenise([document(n) for n in range(20, 35)], demo_tokenizer).ids
    assert pooled.ids.tolist() == expected.tolist()
    assert texts.cut("calibration", 100, 50).pooled(demo_tokenizer).documents == 20
    assert texts.load(demo_tokenizer, 512).facts["eval_documents_left_out"] == 5
    # A folder and a file in it, or two names of one file
    assert Texts(calibration, str(tmp_path / "." / "calibration.jsonl")).one
    assert Texts(None, other).cut("eval", 100, 50).pooled(demo_tokenizer).documents == 20


def test_files_and_their_paragraphs_are_the_same_text(tmp_path: Path) -> None:
    """Many text files are a document each, and few are divided into paragraphs."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(25):
        (folder / f"{n}.txt").write_text(f"{document(n, 40)}\n \n{document(100 + n, 40)}\n")
    few = tmp_path / "few.txt"
    few.write_text("\n\n".join([document(7, 40), document(107, 40), document(200, 40)]))
    assert list(Texts(str(folder), str(few)).cut("eval", 64, 32).documents()) == [document(200, 40)]
    (folder / "new.txt").write_text(document(300, 40))
    left = list(Texts(str(few), str(folder)).cut("eval", 64, 32).documents())
    assert len(left) == 25 and not any("document 7:" in text for text in left)


def test_conversations_of_a_json_array_may_have_different_keys(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": None}]
    records = [{"messages": chat}, {"messages": chat[:1]}]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps(records))
    texts = list(resolve(str(file)).documents("all", "text", None))
    file.with_suffix(".jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert len(texts) == 2 and texts == list(resolve(str(file.with_suffix(".jsonl"))).documents("all", "text", None))


def test_equal_texts_leave_nothing_to_measure_on(tmp_path: Path, demo_tokenizer: Any) -> None:
    same = [document(1)] * 3
    one, two = write(tmp_path / "one.jsonl", same), write(tmp_path / "two.jsonl", same)
    with pytest.raises(DataError, match=r"3 documents, all of them equal.*--eval-data"):
        Texts(one).load(demo_tokenizer, 512)
    with pytest.raises(DataError, match=r"3 documents also stand in .*one.jsonl"):
        Texts(one, two).load(demo_tokenizer, 512)


def test_without_a_text_prose_and_code_are_mixed(demo_tokenizer: Any) -> None:
    loaded = Texts().load(demo_tokenizer, 512)
    assert loaded.facts["calibration_data"] == loaded.facts["eval_data"] == "builtin"
    assert loaded.calibration.shape == loaded.held_out.shape == (32, 512)
    for side in ("train", "held_out"):
        code = set(resolve("stdlib").documents(side, "text", None))
        texts = list(resolve("builtin").documents(side, "text", 0, mixed=True))
        shares = [sum(len(text) for text in texts if (text in code) == is_code) for is_code in (True, False)]
        assert 0.4 < shares[0] / sum(shares) < 0.7
    whole = [set(resolve("builtin").documents(side, "text", 0)) for side in ("train", "held_out")]
    assert not {text for text in whole[0] & whole[1] if len(text) > 200}
    assert len(whole[0]) > 500  # all of the library, to train on


def test_sequences_are_as_long_as_model_and_text_allow() -> None:
    assert default_length(131_072, 16_384, 16_384) == 2048
    assert default_length(512, 16_384) == 512
    assert default_length(2048, 16_384, 3_000) == 512
    assert default_length(64, 100) == 64


def test_token_sets_of_a_tokenizer_without_beginning_keep_their_names(jsonl: str, demo_tokenizer: Any) -> None:
    made_of = TextCut(jsonl, "train", 1024, 64)._definition(demo_tokenizer)
    assert set(made_of) == {
        *("source", "split", "tokens", "sequence_length", "seed", "text_field", "spread", "fingerprint", "tokenizer")
    }


def test_token_sets_of_another_chat_template_have_another_name(jsonl: str, chat_tokenizer: Any, tmp_path: Path) -> None:
    cut = TextCut(jsonl, "train", 1024, 64)
    other = copy.deepcopy(chat_tokenizer)
    assert cut.folder(other, tmp_path) == cut.folder(chat_tokenizer, tmp_path)
    other.chat_template = "{{ messages[0]['content'] }}"
    assert cut.folder(other, tmp_path) != cut.folder(chat_tokenizer, tmp_path)


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("text") / "texts.jsonl", [document(n, 100) for n in range(160)])


def test_every_document_and_every_sequence_begins_as_the_tokenizer_says(
    jsonl: str, chat_tokenizer: Any, demo_tokenizer: Any, tmp_path: Path
) -> None:
    assert (beginning(chat_tokenizer), beginning(demo_tokenizer)) == ([BEGINNING], [])
    ids = demo_tokenizer("a b", add_special_tokens=False)["input_ids"]
    assert tokenise(["a b", "a b"], chat_tokenizer).ids.tolist() == [BEGINNING, *ids, 0] * 2
    for split in data.SPLITS:
        cut = TextCut(jsonl, split, 640, 64)
        rows = load_sequences(jsonl, chat_tokenizer, split=split, tokens=640, sequence_length=64)
        assert (rows[:, 0] == BEGINNING).all()
        assert torch.equal(read_sequences(token_set(cut, chat_tokenizer, tmp_path, shard_tokens=256))[:], rows)
        if split == "train":  # the token replaces the first of a sequence: all others are those of the text
            texts = list(resolve(jsonl).documents("train", "text", 0))
            stream = torch.from_numpy(tokenise(texts, chat_tokenizer).ids)[:640].long().view(10, 64)
            assert torch.equal(rows[:, 1:], stream[:, 1:])


def test_conversations_of_either_form_go_through_the_template(tmp_path: Path, chat_tokenizer: Any) -> None:
    spoken = [("user", f"what is {n}?", f"a number, {n} " * 20) for n in range(40)]
    forms = {
        "messages": [[{"role": r, "content": q}, {"role": "assistant", "content": a}] for r, q, a in spoken],
        "conversations": [[{"from": "human", "value": q}, {"from": "gpt", "value": a}] for _, q, a in spoken],
        "dialogue": [[{"role": r, "content": q}, {"role": "assistant", "content": a}] for r, q, a in spoken],
    }
    expected = [[BEGINNING, *_ids(f"[user] {q}\n[assistant] {a}\n", chat_tokenizer), 0] for _, q, a in spoken]
    for field, records in forms.items():
        file = tmp_path / f"{field}.jsonl"
        file.write_text("".join(json.dumps({field: record, "id": 3}) + "\n" for record in records))
        named = field if field == "dialogue" else "text"
        texts = list(resolve(str(file)).documents("all", named, None))
        block = tokenise(texts, chat_tokenizer)
        documents = [part.tolist() for part in torch.tensor(block.ids).tensor_split(torch.tensor(block.ends[:-1]))]
        assert documents == expected
        loaded = Texts(str(file), text_field=named).load(chat_tokenizer, 512)
        assert (loaded.calibration[:, 0] == BEGINNING).all()


def test_one_file_may_have_text_and_conversations(tmp_path: Path) -> None:
    file = tmp_path / "both.jsonl"
    spoken = [{"role": "user", "content": "what?"}]
    file.write_text("".join(json.dumps(record) + "\n" for record in ({"text": "plain"}, {"messages": spoken})))
    plain, conversation = resolve(str(file)).documents("all", "text", None)
    assert (plain, json.loads(conversation)) == ("plain", spoken)
    file.write_text("".join(json.dumps(record) + "\n" for record in ({"text": "plain"}, {"title": "a"})))
    with pytest.raises(DataError, match="or a conversation in .* of every record, got one with neither"):
        list(resolve(str(file)).documents("all", "text", None))


@pytest.mark.parametrize("name", ["data [v2]", "any*"])
def test_names_are_no_patterns(tmp_path: Path, name: str) -> None:
    for folder in (name, "anything"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "t.jsonl", [f"a text in {folder}"])
    assert all_documents(str(tmp_path / name), "all", "twentieth") == [f"a text in {name}"]


def _ids(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_conversations_that_cannot_be_written_are_refused(
    tmp_path: Path, chat_tokenizer: Any, demo_tokenizer: Any
) -> None:
    file = tmp_path / "chat.jsonl"
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}
    file.write_text(f"{json.dumps(record)}\n{json.dumps({'messages': record['messages'][:1]})}\n")
    with pytest.raises(DataError, match=r"chat.jsonl: field 'messages' contains conversations.*no chat template"):
        Texts(str(file)).load(demo_tokenizer, 512)
    with pytest.raises(DataError, match=r"field 'messages'.*roles user, tool.*no role tool"):
        Texts(str(file)).load(chat_tokenizer, 512)
