"""The first commands of a user, and their results: exit code, and what the output does or does not contain.

Commands run in the folder of `bad_input_folder`: `model` is a Llama of 2 layers of 4 KV heads of 8 in float32 (512 KV
bytes per token, 64 positions, 257 words), `grouped` has 2 KV heads. `...` stands for small texts, see
`bad_input.ELLIPSIS`.
Refusals (exit code 2) may move to the tables of `bad_inputs`, which also hold that nothing is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bad_input import Bad, config, writes
from bad_input_folder import edit_json, fresh_copy, make_folder, run_in

SIZES = "--calibration-tokens 64 --eval-tokens 64 --sequence-length 32"
C = "convert --model model --recipe gqa"
OPENAI = ("role", "content", "user", "assistant")
SHAREGPT = ("from", "value", "human", "gpt")
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class Row(Bad):
    """As `Bad`, with any exit code; `unsaid`: text that must not appear. Output and errors are checked together."""

    code: int = 0
    unsaid: tuple[str, ...] = ()


def chats(key: str, roles: tuple[str, str, str, str], template: str | None = TEMPLATE) -> Callable[[Path], Any]:
    """Conversations in `chats.jsonl`, and the tokenizer's chat template if it has one. `roles`: the keys of a turn,
    and who speaks."""
    role, content, user, assistant = roles

    def turns(number: int) -> list[dict[str, str]]:
        question = f"Question {number}: which heads may share their keys and values?"
        return [{role: user, content: question}, {role: assistant, content: f"{number} of them. " * 9}]

    def prepare(folder: Path) -> None:
        lines = [json.dumps({key: turns(number)}) for number in range(200)]
        (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
        if template is not None:
            (folder / "model" / "chat_template.jinja").write_text(template)

    return prepare


def as_gguf(folder: Path) -> None:
    demo = Path(__file__).resolve().parents[3] / "examples" / "stdlib-llama"
    ran = run_in(folder, ["export", str(demo), "--target", "gguf", "--out", "file"])
    assert ran.code == 0, ran.err


def fields(key: str) -> Callable[[Path], Any]:
    """`odd.jsonl`, whose text stands in another field."""
    lines = "".join(json.dumps({key: f"Document {n}. " + "Heads share keys. " * 20}) + "\n" for n in range(200))
    return writes("odd.jsonl", lines)


RATIOS = (
    Row("a ratio between two plans", f"{C} --kv-ratio 0.3 ...", ("requested 30%, using 25%", "2 of 8 KV heads")),
    Row("a third", f"{C} --kv-ratio 0.3333 ...", ("using 25%", "2 of 8 KV heads")),
    Row("a percentage", f"{C} --kv-ratio 50% ...", ("50", "KV")),
    Row("three heads of four", "convert --model model --recipe least_squares --kv-heads 3 ...", ("75",)),
    Row("three heads, one count for all", "convert --model model --recipe headfold_gqa --kv-heads 3 ...", ("75",)),
    Row("a ratio that must be met", f"{C} --kv-ratio 0.3 --strict ...", ("0.3", "0.25"), code=2),
    Row("a ratio that is met", f"{C} --kv-ratio 0.5 --strict ...", ("50",), unsaid=("requested",)),
    Row("less than any plan takes", f"{C} --kv-ratio 0.01 ...", ("at least 25%",), code=2),
    Row("two ratios of one plan", f"{C} --kv-ratio 0.3,0.25 ...", ("25",)),
    Row("a share of the bytes", f"{C} --kv-bytes 0.5 ...", ("256",)),
    Row("bytes per token", f"{C} --kv-bytes 0.25KiB ...", ("256",)),
    Row("bytes that no plan takes", f"{C} --kv-bytes 1B ...", ("kv_bytes", "128"), code=2),
    Row("no number of bytes", f"{C} --kv-bytes lots ...", ("kv_bytes", "lots", "KiB"), code=2),
    Row("bytes and a ratio", f"{C} --kv-bytes 0.5 --kv-ratio 0.5 ...", ("kv_bytes", "kv_ratio"), code=2),
    Row("more KV heads than there are", "convert --model grouped --recipe gqa --kv-heads 4 ...", ("kv_heads",), code=2),
    Row(
        "an estimate between two plans",
        "estimate --model model --recipe gqa --kv-ratio 0.3",
        ("requested 30%, using 25%",),
    ),
    Row("an inspection between two plans", "inspect model --kv-ratio 0.3 --compare gqa ...", ("25",)),
    Row("a search between two plans", "search mine.yaml search.kv_ratios=[0.3] --dry-run", ("25",)),
)
TEXTS = (
    Row(
        "one text",
        f"{C} --kv-ratio 0.5 --data texts/notes.txt {SIZES}",
        ("texts/notes.txt", "±", "perplexity", "62 tokens"),
    ),
    Row(
        "two texts",
        f"{C} --kv-ratio 0.5 --data texts/notes.txt --eval-data short.txt {SIZES}",
        ("short.txt", "±"),
        writes("short.txt", "A short text of its own, whole. " * 6),
    ),
    Row("no text", f"{C} --kv-ratio 0.5 {SIZES}", ("±", "--data"), unsaid=("on stdlib",)),
    Row(
        "the sequence length of the model",
        f"{C} --kv-ratio 0.5 --data texts/notes.txt --calibration-tokens 64 --eval-tokens 64",
        ("50",),
    ),
    Row(
        "a field of text",
        f"{C} --kv-ratio 0.5 --data odd.jsonl --text-field body {SIZES}",
        ("odd.jsonl",),
        fields("body"),
    ),
    Row(
        "a field that is not there",
        f"{C} --kv-ratio 0.5 --data odd.jsonl {SIZES}",
        ("body", "--text-field"),
        fields("body"),
        code=2,
    ),
    Row(
        "chats",
        f"{C} --kv-ratio 0.5 --data chats.jsonl {SIZES}",
        ("chats.jsonl",),
        chats("messages", OPENAI),
    ),
    Row(
        "chats of ShareGPT",
        f"{C} --kv-ratio 0.5 --data chats.jsonl {SIZES}",
        ("chats.jsonl",),
        chats("conversations", SHAREGPT),
    ),
    Row(
        "chats for a tokenizer without a template",
        f"{C} --kv-ratio 0.5 --data chats.jsonl {SIZES}",
        ("chat template",),
        chats("messages", OPENAI, None),
        code=2,
    ),
    Row(
        "a broken line of JSON",
        f"{C} --kv-ratio 0.5 ... --data odd.jsonl",
        ("odd.jsonl", "line 2"),
        writes("odd.jsonl", '{"text": "a"}\n{{{\n'),
        code=2,
        unsaid=("Arrow",),
    ),
)
RECIPES = (
    Row("no recipe", "convert --model model --kv-ratio 0.5 ...", ("headfold",)),
    Row("a recipe for an engine", "convert --model model --kv-ratio 0.5 --for llama.cpp ...", ("llama.cpp",)),
    Row("an engine misspelt", "convert --model model --kv-ratio 0.5 --for vlm ...", ("did you mean vllm?",), code=2),
    Row("the list of recipes", "recipes", ("headfold_gqa", "arXiv", "2406.06567", "2406.14963", "vLLM")),
    Row(
        "a recipe's name cut off",
        "convert --model model --recipe",
        ("--recipe", "headfold convert --help"),
        code=2,
        unsaid=(".;",),
    ),
)
MODELS = (
    Row("a GGUF file", "convert --model file/model.gguf --recipe gqa --kv-ratio 0.5 ...", ("50",), as_gguf),
    Row(
        "FP8 weights",
        f"{C} --kv-ratio 0.5 ...",
        ("fp8", "--dequantize"),
        config(quantization_config={"quant_method": "fp8"}),
        code=2,
    ),
    Row(
        "GPTQ weights",
        f"{C} --kv-ratio 0.5 ...",
        ("quantised", "gptq"),
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        code=2,
        unsaid=("--dequantize",),
    ),
    Row(
        "a model with code of its own",
        f"{C} --kv-ratio 0.5 ...",
        ("auto_map",),
        config(model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
        code=2,
        unsaid=("trust_remote_code=True", "hf.co"),
    ),
    Row(
        "a quantised model to begin with",
        "init model",
        ("quantised",),
        config(quantization_config={"quant_method": "gptq"}),
        code=2,
    ),
    Row(
        "another tokenizer",
        "evaluate model --original grouped ...",
        ("tokenizer",),
        lambda folder: _another_tokenizer(folder / "grouped"),
        code=2,
    ),
    Row(
        "a rehearsal of a training on too little text",
        "finetune --model model --steps 9999 --learning-rate 1e-3 --out trained --dry-run ...",
        ("train", "sequences"),
        code=2,
        unsaid=("all checks passed",),
    ),
    Row(
        "an estimate for another machine",
        "estimate --model model --recipe gqa --kv-ratio 0.5 --device cuda",
        ("memory",),
    ),
    Row(
        "an export for ollama",
        "export model --target ollama --out fresh",
        ("gguf", "auto"),
        code=2,
        unsaid=("did you mean vllm",),
    ),
    Row("k-quants", "export model --target gguf --dtype q4_k_m --out fresh", ("q4_k_m", "q8_0"), code=2),
)
ROWS = (*RATIOS, *TEXTS, *RECIPES, *MODELS)


def _another_tokenizer(checkpoint: Path) -> None:
    """Two words of the vocabulary change places."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    edit_json(checkpoint / "tokenizer.json", model=tokenizer["model"])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, tiny_model: Any) -> Path:
    root = tmp_path_factory.mktemp("template")
    make_folder(root, root, tiny_model)
    return root


@pytest.mark.parametrize("row", ROWS, ids=[row.what for row in ROWS])
def test_a_first_command(row: Row, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "HEADFOLD_CACHE", "HEADFOLD_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # as in a process of the command's own
    folder = fresh_copy(template, tmp_path / "folder")
    if row.prepare is not None:
        row.prepare(folder)
    ran = run_in(folder, row.arguments)
    shown = f"{ran.out}\n{ran.err}"
    assert ran.code == row.code, shown
    assert [word for word in row.said if word.lower() not in shown.lower()] == [], shown
    assert [word for word in row.unsaid if word.lower() in shown.lower()] == [], shown
    assert "Traceback" not in shown
