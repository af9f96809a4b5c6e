"""Sources of text: the standard library, local files, a hub data set, or tasks, as documents.

A *source* is one of
- `builtin`: prose and code of this interpreter, half and half: the help topics of `pydoc` and files
  of `stdlib`;
- `stdlib`: the Python standard library's source, one document a file, without its tests;
- a local file, folder or glob of .txt, .jsonl, .json or .parquet;
- a hub data set, `name`, `name@subset`;
- `synthetic:NAME`: the tasks of Xiao 2024, see `trainers.text.synthetic_corpus`;

and files and data sets may end in `:split`. Text that belongs to no split, or to `train`, is
divided by the md5 rule below, of small files with a larger held-out side where that is requested
(`Division`); text of any other split (`validation`, `test`) is held out as a whole.

A record of a file or data set has its text in one field, or a conversation in `messages` (role,
content) or `conversations` (from, value): a `Conversation`, which becomes text by the tokenizer's
chat template.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from attention.base.messages import reason
from trainers.text import synthetic_corpus

Side = Literal["train", "held_out", "all"]
"""Documents to train and calibrate on, documents to measure on, or both."""

Division = Literal["twentieth", "by_size", "whole"]
"""How a source is divided into sides. `twentieth`: by the md5 rule. `by_size`: the same, with more
documents on the held-out side of local files that are too small for it. `whole`: not at all, since
another source is for the other side; the built-in sources, whose held-out side is fixed, are
divided by the md5 rule all the same."""

BUILTIN = "builtin"
STDLIB = "stdlib"
HOLD_OUT = 20  # one document of so many is held out
SHUFFLE_BUFFER = (
    10_000  # documents in memory while shuffling; a corpus of fewer is shuffled completely
)
FEW_FILES = (
    20  # fewer text files than this are cut at blank lines: whole files could not be divided
)
BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
SMALL_BYTES = 32 * 2**20  # of files that are read once more to divide them by size
# That `by_size` holds out, some 25,000 tokens, but no more than LARGEST_SHARE of the text.
HELD_OUT_CHARACTERS = 100_000
LARGEST_SHARE = 0.25
TOPICS_HELD_OUT = (
    4  # one of so many help topics: there are 80, and a twentieth of them is no text to measure on
)
NOT_READ = (
    ".csv",
    ".tsv",
    ".xlsx",
    ".xls",
    ".md",
    ".rst",
    ".html",
    ".pdf",
    ".docx",
    ".gz",
    ".bz2",
    ".xz",
    ".zst",
    ".zip",
)
CHAT_FIELDS = ("messages", "conversations")
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function": "tool",
}
_PLAIN = (".txt", ".jsonl", ".json")  # whose size in bytes bounds the text
LIBRARY = Path(sysconfig.get_paths()["stdlib"])
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class DataError(ValueError):
    """Text that cannot be used.

    The message says what was expected, what was found, and what to do.
    """


class Conversation(str):
    """The messages of a conversation as JSON: a list of objects with `role` and `content`.

    Attributes:
        field: Where they were.
    """

    field: str

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], field: str) -> Conversation:
        """From messages of either form. Raises DataError naming `field` for anything else."""
        plain: list[dict[str, Any]] = []
        for message in messages:
            fields = {name: value for name, value in message.items() if value is not None}
            if "from" in fields and "value" in fields:
                fields = {
                    "role": ROLES.get(str(fields["from"]), fields["from"]),
                    "content": fields["value"],
                }
            if not isinstance(fields.get("role"), str) or not (
                {"content", "tool_calls"} & set(fields)
            ):
                raise DataError(
                    f"{field}: expected messages with role and content (or from and value), got "
                    f"one with "
                    f"{sorted(fields)}"
                )
            plain.append(fields)
        conversation = cls(json.dumps(plain, ensure_ascii=False, sort_keys=True))
        conversation.field = field
        return conversation

    @property
    def messages(self) -> list[dict[str, Any]]:
        return json.loads(self)


def is_held_out(identity: str, one_in: int = HOLD_OUT) -> bool:
    """Return whether a document is held out, by the md5 digest of what identifies it.

    Args:
        identity: What identifies the document.
        one_in: About one document in so many is held out.
    """
    return _md5(identity) % one_in == 0


def _md5(identity: str) -> int:
    return int(hashlib.md5(identity.encode()).hexdigest(), 16)


def document_digest(text: str) -> bytes:
    """Return what two equal documents have in common, in 16 bytes."""
    return hashlib.md5(text.encode()).digest()


@dataclass(frozen=True)
class Corpus:
    """A resolved source: `fingerprint` changes when the text may have changed."""

    source: str
    kind: Literal["builtin", "stdlib", "files", "hub", "synthetic"]
    name: str
    fingerprint: str
    split: str | None = None
    subset: str | None = None
    files: tuple[Path, ...] = field(default=(), repr=False)

    @property
    def wholly_held_out(self) -> bool:
        return self.split not in (None, "train")

    @property
    def divisible(self) -> bool:
        """Whether the side of a document depends on how the source is divided."""
        return self.kind in ("files", "hub") and not self.wholly_held_out

    @property
    def is_plain_text(self) -> bool:
        """Whether it is of text files, which are documents or have paragraphs that are."""
        return self.kind == "files" and BUILDERS[self.files[0].suffix] == "text"

    @property
    def is_small(self) -> bool:
        """Whether files are so small that `by_size` may hold out more than the md5 rule."""
        return bool(self.files) and not self.wholly_held_out and self.size <= SMALL_BYTES

    @property
    def text_of(self) -> tuple[Any, ...]:
        """The same for two names of the same text."""
        return self.kind, self.files or self.name, self.subset, self.split or "train"

    @property
    def most_tokens(self) -> int | None:
        """More tokens cannot be in the text, beginning and end tokens included.

        None where only reading it shows that.
        """
        if self.kind not in (STDLIB, BUILTIN) and not (
            self.files and self.files[0].suffix in _PLAIN
        ):
            return None
        # A token stands for a byte or more, and so does a document, which has one end token
        return 2 * self.size

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.stat().st_size for file in self.files)

    def documents(
        self,
        side: Side,
        text_field: str,
        seed: int | None,
        division: Division = "twentieth",
        *,
        mixed: bool = False,
    ) -> Iterator[str]:
        """Texts of one side, in the order of the source, or shuffled when a seed is given.

        Args:
            mixed: Of `builtin` only as much code as there is prose.

        Raises:
            DataError: When the source is missing, has no `text_field`, is held out and used to
                train, or cannot be divided.
        """
        if side == "train" and self.wholly_held_out:
            raise DataError(
                f"{self.source}: split {self.split!r} is held out and cannot be trained on or "
                f"calibrated with; "
                f"name {self.name} without it, or its train split"
            )
        if self.kind == BUILTIN:
            return self._builtin(side, seed, mixed)
        if self.kind == STDLIB:
            return self._library(side, seed)
        if self.kind == "synthetic":
            return synthetic_corpus.documents(self.name, side == "train", seed)
        return self._datasets("all" if division == "whole" else side, text_field, seed, division)

    def _library(self, side: Side, seed: int | None) -> Iterator[str]:
        names = [(file, file.relative_to(LIBRARY).as_posix()) for file in self.files]
        files = [
            f for f, name in names if side == "all" or is_held_out(name) == (side == "held_out")
        ]
        for file in _shuffled(files, seed):
            yield file.read_text(encoding="utf-8", errors="replace")

    def _builtin(self, side: Side, seed: int | None, mixed: bool) -> Iterator[str]:
        """Topics and as much code, by turns; then the rest of the code, unless `mixed`."""
        topics = help_topics()
        names = sorted(
            name
            for name in topics
            if side == "all" or is_held_out(name, TOPICS_HELD_OUT) == (side == "held_out")
        )
        prose = [topics[name] for name in _shuffled(names, seed)]
        # Shuffled always: files in the order of their names would be those of a few packages
        code = self._library(side, 0 if seed is None else seed)
        characters = [0, 0]
        for text in prose:
            characters[0] += len(text)
            yield text
            while characters[1] < characters[0] and (file := next(code, None)) is not None:
                characters[1] += len(file)
                yield file
        if not mixed:
            yield from code

    def _datasets(
        self, side: Side, text_field: str, seed: int | None, division: Division
    ) -> Iterator[str]:
        more = (
            self._held_out_by_size(text_field)
            if side != "all" and division == "by_size"
            else frozenset()
        )
        stream = _open(self, paragraphs=division != "whole")
        if seed is not None:
            stream = stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        for text in _texts(stream, text_field, self):
            apart = is_held_out(text) if not more else document_digest(text) in more
            if self.wholly_held_out or side == "all" or apart == (side == "held_out"):
                yield text

    def _held_out_by_size(self, text_field: str) -> frozenset[bytes]:
        """Digests of the held-out documents of small files.

        Those by the md5 rule, and of the others as many as it takes, in the order of the digests.
        Empty where the md5 rule is enough.

        Raises:
            DataError: For text that has less than two different documents.
        """
        if not self.is_small:
            return frozenset()
        lengths: dict[str, int] = {}
        documents = 0
        for text in _texts(_open(self, paragraphs=True), text_field, self):
            lengths[text] = len(text)
            documents += 1
        if not lengths:
            return frozenset()
        if len(lengths) == 1:
            description = (
                "1 document" if documents == 1 else f"{documents} documents, all of them equal"
            )
            raise DataError(
                f"{self.source}: expected at least two different documents, so that one can be "
                f"held out to measure on, "
                f"found {description}; give more text, or other text to measure on (--eval-data)"
            )
        order = sorted(lengths, key=lambda text: (_md5(text) % HOLD_OUT, _md5(text)))
        needed = min(HELD_OUT_CHARACTERS, LARGEST_SHARE * sum(lengths.values()))
        chosen: list[str] = []
        characters = 0
        for text in order[:-1]:
            if characters >= needed and not is_held_out(text):
                break
            chosen.append(text)
            characters += lengths[text]
        return frozenset(map(document_digest, chosen))


def _shuffled(items: list[Any], seed: int | None) -> list[Any]:
    import torch

    if seed is None:
        return items
    return [
        items[i]
        for i in torch.randperm(len(items), generator=torch.Generator().manual_seed(seed)).tolist()
    ]


def help_topics() -> dict[str, str]:
    """Return the texts of `help()` about Python, by name: English with examples.

    Empty where an interpreter comes without.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return {name: text for name, text in topics.items() if text.strip()}


def resolve(source: str) -> Corpus:
    """Return the corpus that a source names.

    Raises:
        DataError: When local files are named but missing or of no known type.
        TypeError: For texts themselves.
    """
    if not isinstance(source, str):
        raise TypeError(
            "data: expected the name of a source of text (str: a local file or folder, a hub data "
            "set, or "
            f"'stdlib'), got {type(source).__name__}; write texts to a .jsonl file, one "
            f'{{"text": ...}} object per '
            "line, and pass its path"
        )
    if not source.strip():
        raise DataError(
            "a source of text has no name; give 'builtin', 'stdlib', local text or a hub data set"
        )
    if source in (STDLIB, BUILTIN):
        files = tuple(library_files())
        parts = [platform.python_version(), *map(_stamp, files)]
        if source == STDLIB:
            return Corpus(source, STDLIB, source, _digest(*parts), files=files)
        # The topics themselves.
        code = tuple(file for file in files if file.parent.name != "pydoc_data")
        return Corpus(source, BUILTIN, source, _digest(*parts, *help_topics().values()), files=code)
    if source.startswith(synthetic_corpus.SYNTHETIC_PREFIX):
        name = source.removeprefix(synthetic_corpus.SYNTHETIC_PREFIX)
        try:
            synthetic_corpus.tasks_of(name, True)
        except ValueError as error:
            raise DataError(str(error)) from None
        return Corpus(source, "synthetic", name, _digest(name, synthetic_corpus.fingerprint()))
    name, split = _split_off(source)
    try:
        files = _local_files(name)
    except OSError as error:
        raise DataError(
            f"{source}: cannot be read ({error.strerror}: {error.filename}); name a folder of text"
        ) from None
    if files:
        return Corpus(source, "files", name, _digest(*map(_stamp, files)), split, files=files)
    path = Path(name).expanduser()
    kinds = ", ".join(BUILDERS)
    if path.is_file():
        raise DataError(
            f"{source}: {path.suffix or 'a file without a suffix'} is not read; expected {kinds} "
            f"(a table as .jsonl: "
            '{"text": "..."} in each line)'
        )
    if path.exists() or glob.has_magic(name):
        raise DataError(f"{source}: expected a file, folder or glob of {kinds}; found none there")
    if path.suffix in (*BUILDERS, *NOT_READ) or name.startswith((".", "/", "~")):
        raise DataError(f"{source}: no such file; expected a file, folder or glob of {kinds}")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+)?", name):
        raise DataError(
            f"{source!r} is neither 'builtin', nor 'stdlib', nor local text (no such file), nor a "
            f"hub name like "
            "owner/name@subset:split"
        )
    hub_name, _, subset = name.partition("@")
    return Corpus(source, "hub", hub_name, _digest(name, split or "train"), split, subset or None)


def library_files() -> Iterable[Path]:
    """Return the .py files of this interpreter's standard library, by relative path.

    Tests and installed packages are left out.
    """
    files: list[Path] = []
    for folder, below, names in os.walk(LIBRARY):
        # Installed packages are most of the tree.
        below[:] = [name for name in below if name not in NOT_LIBRARY]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda f: f.relative_to(LIBRARY).as_posix())


def _split_off(source: str) -> tuple[str, str | None]:
    name, colon, split = source.rpartition(":")
    if colon and re.fullmatch(r"\w+", split) and len(name) > 1:  # len: C:\folder keeps its drive
        return name, split
    return source, None


def _local_files(name: str) -> tuple[Path, ...]:
    path = Path(name).expanduser()
    if path.is_file():
        candidates = [path]
    elif path.is_dir():
        candidates = [f for f in path.rglob("*") if f.is_file()]
    else:
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - the pattern may be absolute
        candidates = [f for f in map(Path, names) if f.is_file()]
    files = tuple(sorted(f.resolve() for f in candidates if f.suffix in BUILDERS))
    kinds = sorted({BUILDERS[f.suffix] for f in files})
    if len(kinds) > 1:
        raise DataError(
            f"{name}: expected files of one type, found {kinds}; name one by a glob like "
            f"'{name}/*.jsonl'"
        )
    return files


def _open(corpus: Corpus, *, paragraphs: bool) -> Any:
    """Return the source as a streaming data set, so that its size does not matter.

    Args:
        paragraphs: Cut few text files at lines without a word, spaces or not (WikiText has a space
            in them), so that they can be divided. False: at empty lines alone.
    """
    from datasets import IterableDataset, disable_progress_bars, load_dataset, logging

    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)  # what goes wrong is raised as well, and reported once
    try:
        if corpus.kind == "hub":
            return load_dataset(
                corpus.name, corpus.subset, split=corpus.split or "train", streaming=True
            )
        builder = BUILDERS[corpus.files[0].suffix]
        options = {}
        if builder == "text":
            if paragraphs and len(corpus.files) < FEW_FILES and _has_text(corpus):
                return IterableDataset.from_generator(
                    _paragraphs, gen_kwargs={"files": list(corpus.files)}
                )
            options["sample_by"] = "paragraph" if len(corpus.files) < FEW_FILES else "document"
        names = [glob.escape(str(f)) for f in corpus.files]
        return load_dataset(
            builder, data_files={"train": names}, split="train", streaming=True, **options
        )
    except (
        Exception
    ) as error:  # the library raises a dozen types, including those of its HTTP client
        if corpus.files and not _has_text(corpus):
            raise DataError(f"{corpus.source}: expected text, and what it names is empty") from None
        _check_json(corpus)
        raise DataError(
            f"{corpus.source}: cannot be opened as a data set: {type(error).__name__}: "
            f"{reason(error)}; "
            "expected 'builtin', 'stdlib', local .txt, .jsonl, .json or .parquet, or a hub name "
            "that this machine can "
            "reach"
        ) from error


def _has_text(corpus: Corpus) -> bool:
    return any(file.stat().st_size for file in corpus.files)


def _paragraphs(files: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Yield the paragraphs of text files as records: what stands between lines without a word."""
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for blank, group in itertools.groupby(lines, key=lambda line: not line.strip()):
                if not blank:
                    yield {"text": "".join(group).removesuffix("\n")}


def _texts(stream: Any, text_field: str, corpus: Corpus) -> Iterator[str]:
    try:
        for row in stream:
            text = _text(row, text_field, corpus)
            if text.strip():
                yield text
    except DataError:
        raise
    except Exception as error:
        _check_json(corpus)
        raise DataError(
            f"{corpus.source}: reading failed: {type(error).__name__}: {reason(error)}"
        ) from error


def _text(row: Mapping[str, Any], text_field: str, corpus: Corpus) -> str:
    """Return the text of a record, or its `Conversation`."""
    name = text_field
    if row.get(name) is None:  # of a file with conversations too, the field is empty there
        name = next((chat for chat in CHAT_FIELDS if isinstance(row.get(chat), list)), "")
    if not name:
        if text_field in row:
            raise DataError(
                f"{corpus.source}: expected text in field {text_field!r} or a conversation in "
                f"{' or '.join(CHAT_FIELDS)} of every record, got one with neither; remove it"
            )
        raise DataError(
            f"{corpus.source}: expected a field {text_field!r}, or a conversation in "
            f"{' or '.join(CHAT_FIELDS)}, got "
            f"{sorted(row)}; name the field with --text-field (data.text_field in a search)"
        )
    value = row[name]
    if isinstance(value, str):
        return value
    if isinstance(value, list):  # of a JSON array, where records have different keys
        value = [_message(each) for each in value]
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return Conversation.of(value, f"{corpus.source}: field {name!r}") if value else ""
    raise DataError(
        f"{corpus.source}: field {name!r} must be text, or a list of messages, got "
        f"{type(value).__name__}"
    )


def _message(value: Any) -> Any:
    """Return a message that `datasets` gives as JSON; anything else as it is."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def _check_json(corpus: Corpus) -> None:
    """Raise DataError naming the first line of a JSON file that is none."""
    for file in (
        corpus.files
        if corpus.kind == "files" and BUILDERS[corpus.files[0].suffix] == "json"
        else ()
    ):
        try:
            content = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise DataError(
                f"{corpus.source}: {file.name} is not encoded in UTF-8; convert it first"
            ) from None
        starts = content.lstrip()[:1]
        pieces = [(1, content)] if starts == "[" else list(enumerate(content.split("\n"), start=1))
        for first, piece in pieces:
            try:
                record = json.loads(piece) if piece.strip() else {}
            except ValueError as error:
                line = first + getattr(error, "lineno", 1) - 1
                shown = content.split("\n")[line - 1].strip()[:60]
                raise DataError(
                    f"{corpus.source}: line {line} of {file.name} is not valid JSON "
                    f"({getattr(error, 'msg', error)}): {shown!r}; correct or remove that line"
                ) from None
            if starts != "[" and not isinstance(record, dict):
                raise DataError(
                    f"{corpus.source}: line {first} of {file.name} must be a JSON object such as "
                    f'{{"text": "..."}}, got {piece.strip()[:60]!r}'
                )


def _stamp(file: Path) -> str:
    stat = file.stat()
    return f"{file}|{stat.st_size}|{stat.st_mtime_ns}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
