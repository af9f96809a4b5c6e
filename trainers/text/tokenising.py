"""Documents to token ids, block by block, so that several processes can work on one text.

The result is the same. A text is the concatenation of its documents, each followed by the end
token, and begun as the tokenizer begins a text (`beginning`). It is tokenised in blocks of
documents (`tokenise`, which a process of any machine can do for any block) and cut at any token
(`TokenReader`): which block was tokenised where, and how many at a time, changes no token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from attention.base.environment import environment_variable
from attention.base.messages import reason
from trainers.text.corpora import Conversation, DataError
from trainers.text.token_sets import TextPosition

DOCUMENTS_AT_ONCE = 256
PARALLELISM = "TOKENIZERS_PARALLELISM"
BLOCK_CHARACTERS = 1_000_000  # a block ends with the document that reaches it


class TokenBlock(NamedTuple):
    """Token ids of some documents, each with beginning and end.

    Attributes:
        ids: `[n]` int32.
        ends: Where each document ends in `ids`.
    """

    ids: np.ndarray
    ends: np.ndarray


Tokenise = Callable[[Iterable[list[str]], Any], Iterator[TokenBlock]]
"""`tokenise(blocks, tokenizer)`: the tokens of each block of documents, in their order."""


def text_blocks(texts: Iterator[str]) -> Iterator[list[str]]:
    """Documents in lists. No list goes beyond a multiple of DOCUMENTS_AT_ONCE documents."""
    block: list[str] = []
    characters = 0
    for number, text in enumerate(texts, start=1):
        block.append(text)
        characters += len(text)
        if number % DOCUMENTS_AT_ONCE == 0 or characters >= BLOCK_CHARACTERS:
            yield block
            block = []
            characters = 0
    if block:
        yield block


def tokenise(texts: list[str], tokenizer: Any) -> TokenBlock:
    """Return the tokens of one block: of nothing but the block and the tokenizer.

    Raises:
        DataError: For conversations that the tokenizer's chat template does not take.
    """
    first = beginning(tokenizer)
    end = tokenizer.eos_token_id
    written = [
        _written(text, tokenizer) if isinstance(text, Conversation) else text for text in texts
    ]
    documents: list[np.ndarray] = []
    for text, ids in zip(texts, _ids(written, tokenizer), strict=True):
        if isinstance(text, Conversation):  # begins and ends as the template defines
            document = ids if ids[-1:] == [end] else [*ids, end]
        else:
            document = [*first, *ids, end]
        documents.append(np.array(document, dtype=np.int32))
    return TokenBlock(np.concatenate(documents), np.cumsum([len(ids) for ids in documents]))


def beginning(tokenizer: Any) -> list[int]:
    """Return what the tokenizer puts before a text, as it is served.

    The beginning token of most Llamas and Gemmas, nothing for GPT-2 and Qwen.
    """
    plain = _ids(["a"], tokenizer)[0]
    whole = list(tokenizer("a")["input_ids"])
    starts = range(len(whole) - len(plain) + 1)
    return whole[
        : next((start for start in starts if whole[start : start + len(plain)] == plain), 0)
    ]


def _written(conversation: Conversation, tokenizer: Any) -> str:
    """Return a conversation as text, special tokens included."""
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{conversation.field} contains conversations, and the tokenizer has no chat template "
            f"for them; copy "
            "chat_template.jinja (or tokenizer_config.json) of the model's chat version into its "
            "folder, or give records with their text in one field (--text-field)"
        )
    try:
        return tokenizer.apply_chat_template(conversation.messages, tokenize=False)
    except Exception as error:  # of the template, which may raise anything
        roles = ", ".join(str(message["role"]) for message in conversation.messages[:6])
        raise DataError(
            f"{conversation.field}: the tokenizer's chat template does not take a conversation of "
            f"roles {roles}: "
            f"{reason(error)}; change or remove such records"
        ) from None


def _ids(texts: list[str], tokenizer: Any) -> list[list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # without offsets into the text it takes two thirds of the time
        return [
            encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)
        ]
    # verbose=False: a document may be longer than the model's context, since it is cut afterwards
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]


def tokenise_here(texts: Iterable[list[str]], tokenizer: Any) -> Iterator[TokenBlock]:
    """In this process, one block after the other, the documents of a block on all cores."""
    for block in texts:
        # Tokenizers read it at each call. Outside it stays as it was: what a process forks off may
        # not use their threads.
        with environment_variable(PARALLELISM, "true"):
            tokens = tokenise(block, tokenizer)
        yield tokens


class TokenReader:
    """Takes runs of tokens from blocks, and knows where in the text it is.

    The blocks begin with the document of `start`.
    """

    def __init__(self, tokens: Iterator[TokenBlock], start: TextPosition) -> None:
        self._blocks = tokens
        self._before = start.documents
        self._at = start.tokens
        self._ids = np.empty(0, np.int32)
        self._ends = np.empty(0, np.int64)

    def take(self, count: int) -> np.ndarray:
        """Return the next `count` tokens, int32; fewer where the text ends."""
        tokens = np.empty(count, np.int32)
        done = 0
        while done < count and (self._at < len(self._ids) or self._advance()):
            piece = self._ids[self._at : self._at + count - done]
            tokens[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return tokens[:done]

    def _advance(self) -> bool:
        """To the next block, if there is one."""
        block = next(self._blocks, None)
        if block is None:
            return False
        self._at -= len(self._ids)
        self._before += len(self._ends)
        self._ids, self._ends = block
        return True

    @property
    def place(self) -> TextPosition:
        """Before the next token."""
        done = int(np.searchsorted(self._ends, self._at, side="right"))
        return TextPosition(
            self._before + done, self._at - (int(self._ends[done - 1]) if done else 0)
        )


def pool(tokens: Iterator[TokenBlock], limit: int) -> tuple[np.ndarray, int]:
    """Return all tokens of the first documents that have `limit` tokens together, and their number.

    The number is a multiple of `DOCUMENTS_AT_ONCE`.
    """
    ids = [np.empty(0, np.int32)]
    documents = 0
    total = 0
    for block in tokens:
        ids.append(block.ids)
        documents += len(block.ends)
        total += len(block.ids)
        if total >= limit and documents % DOCUMENTS_AT_ONCE == 0:
            break
    return np.concatenate(ids), documents


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of all that decides which tokens a text or a conversation becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = (
        backend.to_str()
        if backend is not None
        else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    parts = [type(tokenizer).__name__, str(tokenizer.eos_token_id), state]
    if template := getattr(tokenizer, "chat_template", None):
        parts.append(json.dumps(template, sort_keys=True))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def largest_id(tokenizer: Any) -> int:
    """Return the largest token id of a tokenizer."""
    return max(tokenizer.get_vocab().values())


def check_end_token(tokenizer: Any) -> None:
    """Raise DataError for a tokenizer that has none."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no end token to join documents with; set tokenizer.eos_token"
        )
