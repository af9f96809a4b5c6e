"""The texts of a search as token sets, which are in the storage for all its searches."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attention.checkpoint import Checkpoint
from orchestrator import checkpoints
from orchestrator.cluster.tokenising import tokeniser
from orchestrator.config.schema import SearchConfig
from trainers.packing import check_packing
from trainers.text.corpora import DataError, resolve
from trainers.text.data import SMALL_TEXT, SPLITS, Split, TextCut, other_sources, token_set
from trainers.text.token_sets import is_complete
from trainers.text.unseen import UnseenCut

_PROMOTION = "promotion"
"""In addition to the splits: the training text of a promotion that has its own."""
TEST = "test"
"""In addition to the splits: the text of the gate and the model card."""


@dataclass(frozen=True)
class SearchTexts:
    """Texts that each split is cut from.

    Attributes:
        cache: Folder of token sets.
        needs_test: Whether too little text for the gate is refused; else the gate has no
            separate text.
    """

    model: str
    tokenizer: Any
    cache: Path
    cuts: dict[str, TextCut | UnseenCut]
    needs_test: bool = False

    @classmethod
    def check(cls, config: SearchConfig, model: Checkpoint, cache: Path) -> SearchTexts:
        """Check all that can be checked before a text is read.

        Raises:
            DataError: Naming split and source.
        """
        cuts: dict[str, TextCut] = {}
        texts: dict[str, tuple[Split, str, int]] = {
            split: (split, *config.data.section(split)) for split in SPLITS
        }
        if (fresh := config.promotion.data) is not None:
            texts[_PROMOTION] = "train", config.promotion_source, fresh.tokens
        learned = [source for split, source, _ in texts.values() if split != "eval"]
        for name, (split, source, tokens) in texts.items():
            with _named(name, source):
                cuts[name] = _cut(config, source, split, tokens, learned)
                cuts[name].check()
        source, tokens = config.data.section(TEST)
        with _named(TEST, source):
            text = _cut(config, source, "eval", tokens, learned)
            if config.data.test is not None:
                text.check()
        every: dict[str, TextCut | UnseenCut] = {**cuts, TEST: UnseenCut(text, cuts["eval"])}
        tokenizer = checkpoints.load_tokenizer(model)
        promoted_on = _PROMOTION if _PROMOTION in cuts else "train"
        for name, settings in (("train", config.train), (promoted_on, config.promotion_train)):
            with _named(name, cuts[name].source):
                check_packing(settings, cuts[name], tokenizer, model.config.model_type)
        return cls(model.path, tokenizer, cache, every, config.data.test is not None)

    @cached_property
    def folders(self) -> dict[str, Path]:
        """The folder of each split's token set, which may not exist yet."""
        return {split: cut.folder(self.tokenizer, self.cache) for split, cut in self.cuts.items()}

    @property
    def divisions(self) -> dict[str, str]:
        """How the source of each split is divided into held-out text and the rest."""
        return {
            name: cut.division for name in SPLITS if isinstance(cut := self.cuts[name], TextCut)
        }

    def complete(self) -> list[str]:
        """Return the splits whose token set is complete."""
        return [split for split, folder in self.folders.items() if is_complete(folder)]

    def make_small(self) -> None:
        """Tokenise, in this process, missing texts of at most SMALL tokens.

        Raises DataError.
        """
        for split, cut in self.cuts.items():
            if cut.tokens <= SMALL_TEXT:
                with self._checked(split, cut.source):
                    token_set(cut, self.tokenizer, self.cache)

    def make_all(self) -> None:
        """Tokenise missing texts on all CPUs of the cluster that this process is connected to.

        Raises DataError.
        """
        for split, cut in self.cuts.items():
            with self._checked(split, cut.source):
                token_set(
                    cut, self.tokenizer, self.cache, tokenise=tokeniser(self.model, cut.tokens)
                )

    @contextmanager
    def _checked(self, split: str, source: str) -> Iterator[None]:
        """Name the split of a text that is too small; print a note for the gate's own text."""
        try:
            with _named(split, source):
                yield
        except DataError as error:
            if split != TEST or self.needs_test:
                raise
            print(
                f"note: {error}; the gate compares the losses that trials were chosen by",
                file=sys.stderr,
            )


def _cut(
    config: SearchConfig, source: str, split: Split, tokens: int, learned: Sequence[str]
) -> TextCut:
    """Return a split of a source, divided as the verbs divide it that measure a searched model.

    What is measured on has no document of another source that is `learned` from.
    """
    data = config.data
    corpus = resolve(source)
    return TextCut(
        source,
        split,
        tokens,
        data.sequence_length,
        config.search.seed,
        data.text_field,
        "by_size" if corpus.divisible and corpus.is_small else "twentieth",
        other_sources(corpus, learned) if split == "eval" else (),
    )


@contextmanager
def _named(split: str, source: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        key = "promotion.data" if split == _PROMOTION else f"data.{split}"
        raise DataError(f"{key}: source {source!r}: {error}") from None
