"""A tokenizer in a GGUF file: byte-level BPE, and the BPE with byte fallback of Llama 2 and Gemma.

llama.cpp splits text by rules that it has under a name; a tokenizer is matched to a name by its own
splitting rule, and a name in a file that is read to a rule.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from attention.base.messages import cut, reason
from attention.io.targets import TargetError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "llama-bpe": CONTRACTIONS + WORDS + r"\p{N}{1,3}" + REST,
    "qwen2": CONTRACTIONS + WORDS + r"\p{N}" + REST,
}
"""Splitting rules that llama.cpp has, by its names for them."""
LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")
"""Its names for the tokenizer of Llama 3: without a word on it in the file it puts the beginning
token first, and a word that is a token is not merged from parts."""
_SAME = {"stablelm2": "qwen2", **dict.fromkeys(LLAMA_3, "llama-bpe")}
_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "mellum", "a.x-4.0", "gigachat")
"""Its names for the rule of GPT-2; the first is written."""
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Its names for the same rule after each digit was split off; the first is written."""


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Any, size: int) -> None:
    """Put a tokenizer into a file for a model that embeds `size` tokens.

    Args:
        writer: The file.
        tokenizer: As in `attention.io.checkpoint.save`; None for none.
        size: Rows of the embedding.

    Raises:
        TargetError: For a tokenizer that is not the model's or that llama.cpp does not have.
    """
    if tokenizer is None:
        writer.add_tokenizer_model("none")
        return
    loaded = _load(tokenizer)
    whole = json.loads(loaded.backend_tokenizer.to_str())
    tokens = {id: token for token, id in loaded.get_vocab().items()}
    if not tokens:
        writer.add_tokenizer_model("none")
        return
    if max(tokens) >= size:
        raise TargetError(
            f"the tokenizer has token ids up to {max(tokens)}, the model embeds {size} tokens: it "
            f"is not this model's "
            "tokenizer; give the one that it was trained with"
        )
    if whole["model"].get("type") != "BPE":
        raise TargetError(
            f"target gguf takes BPE tokenizers, got {whole['model'].get('type')}; export to target "
            f"gqa"
        )
    _add_tokens(writer, whole, tokens, size)
    _add_special(writer, loaded)


def _load(tokenizer: Any) -> Any:
    """Return the tokenizer as transformers reads it, from any kind of files."""
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    try:
        return AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False)
    except Exception as error:
        raise TargetError(
            f"the tokenizer of {str(tokenizer)!r} cannot be read: {reason(error)}"
        ) from None


def _add_tokens(
    writer: gguf.GGUFWriter, whole: dict[str, Any], tokens: dict[int, str], size: int
) -> None:
    model = whole["model"]
    added = {token["id"]: token for token in whole.get("added_tokens", [])}
    fallback = bool(model.get("byte_fallback"))
    names = []
    kinds = []
    for index in range(size):
        names.append(tokens.get(index, f"[unused {index}]"))
        kinds.append(_kind(names[-1], index in tokens, added.get(index), fallback))
    merges = [
        merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", [])
    ]
    writer.add_tokenizer_model("llama" if fallback else "gpt2")
    if not fallback:
        writer.add_tokenizer_pre(split_rule(whole))
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    if fallback:
        ranks = {"".join(merge): -float(rank) for rank, merge in reversed(list(enumerate(merges)))}
        writer.add_token_scores([ranks.get(name, 0.0) for name in names])
        writer.add_add_space_prefix(
            "Prepend" in json.dumps(whole.get("normalizer")) or _prefixes(whole)
        )
    else:
        writer.add_token_merges([" ".join(merge) for merge in merges])


def _kind(name: str, in_vocabulary: bool, added: dict[str, Any] | None, fallback: bool) -> int:
    if not in_vocabulary:
        return gguf.TokenType.UNUSED
    if added is not None:
        return gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    if fallback and len(name) == 6 and name.startswith("<0x"):
        return gguf.TokenType.BYTE
    return gguf.TokenType.NORMAL


def _prefixes(whole: dict[str, Any]) -> bool:
    pre = whole.get("pre_tokenizer") or {}
    return pre.get("type") == "Metaspace" and pre.get("prepend_scheme", "always") != "never"


def split_rule(whole: dict[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a byte-level tokenizer splits text.

    Raises:
        TargetError: For another way.
    """
    pre = whole.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        raise TargetError(
            f"target gguf takes byte-level tokenizers without a prefix space, got "
            f"{cut(json.dumps(pre))}"
        )
    if last.get("use_regex", True):
        if len(steps) == 1:
            return _GPT2[0]
        if len(steps) == 2 and steps[0].get("individual_digits"):
            return _DIGITS[0]
    pattern = steps[0].get("pattern", {}).get("Regex") if len(steps) == 2 else None
    for name, known in _PATTERNS.items():
        if pattern == known:
            return name
    raise TargetError(
        f"llama.cpp has no known name for the way in which this tokenizer splits text: "
        f"{cut(json.dumps(pre))}; add it to _PATTERNS in "
        "attention/io/targets/_gguf/vocabulary.py, or export to another target"
    )


def pre_tokenizer(name: str) -> Any:
    """Return the splitting rule that llama.cpp has under `name`, the inverse of `split_rule`.

    None for a name that is not known here.
    """
    if name in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _DIGITS:
        first = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    name = _SAME.get(name, name)
    if name in _PATTERNS:
        first = pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([first, last])
    return None


def _add_special(writer: gguf.GGUFWriter, tokenizer: Any) -> None:
    for name in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{name}_token_id", None)
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(
        tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    )
    writer.add_add_eos_token(
        tokenizer.eos_token_id is not None and ids[-1:] == [tokenizer.eos_token_id]
    )
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):  # of several names
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)
