"""The tasks of the command line as functions, for models and texts in memory as well."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any, Literal, TypedDict, cast

import torch
from transformers import PreTrainedModel
from typing_extensions import Unpack

from attention.base.cache import cache_folder
from attention.checkpoint import Checkpoint
from attention.io import checkpoint as files
from attention.io.sources import CheckpointError, fetched, write_source_note
from headfold.results import (
    ConversionResult,
    EvaluationResult,
    ExportArguments,
    ExportResult,
    InspectionResult,
    export_folder,
    export_to,
)
from orchestrator.config.options import ConvertOptions, EvaluateOptions, InspectOptions
from orchestrator.config.schema import ConfigError
from orchestrator.tasks.convert import Convert
from orchestrator.tasks.evaluate import Evaluate
from orchestrator.tasks.inspect import Inspect
from search_spaces.recipes.recipe import Recipe
from trainers.text.data import DataError

ModelSource = str | Path | Checkpoint | PreTrainedModel
"""A folder, a hub name, an open checkpoint, or a model of transformers."""
Data = Any
"""Text: a source as `--data` takes it, a list of strings, or a `datasets.Dataset`."""


class EvalArguments(TypedDict, total=False):
    """Options of all functions; `orchestrator.config.options` has meanings and defaults."""

    text_field: str
    eval_tokens: int | None
    sequence_length: int | None
    seed: int
    dtype: str
    device: str
    dequantize: bool


class ConversionArguments(EvalArguments, total=False):
    """Options of `convert` and `inspect`."""

    kv_heads: str | int | Sequence[int] | None
    kv_bytes: str | float | Sequence[float] | None
    strict: bool
    overrides: Sequence[str] | Mapping[str, Any] | None
    calibration_tokens: int | None
    cache_dir: str | Path | None


class ConvertArguments(ConversionArguments, total=False):
    """Options of `convert` alone."""

    recipe: str | Recipe
    engine: str | None
    cache_format: str | None
    layerwise: bool | None
    overwrite: bool
    polish: int
    polish_weights: Literal["all", "kv"]


class InspectArguments(ConversionArguments, total=False):
    """Options of `inspect` alone."""

    recipe: str
    compare: str | Sequence[str] | None
    counts: str | None
    agreement: bool


class EvaluateArguments(EvalArguments, total=False):
    """Options of `evaluate` alone."""

    baseline: str | Path | Checkpoint | None
    tasks: str | Sequence[str] | None
    prompts: str | Sequence[str] | None
    context_lengths: str | None
    context_texts: int | None
    speed_tokens: int
    cache_format: str | None
    engine: str | None
    engine_python: str | None
    cache_types: str | Sequence[str] | None
    cache_memory: int
    trust_remote_code: bool


def convert(
    model: ModelSource,
    kv_ratio: str | float | None = None,
    data: Data = None,
    output_dir: str | Path | None = None,
    *,
    eval_data: Data = None,
    tokenizer: Any = None,
    **options: Unpack[ConvertArguments],
) -> ConversionResult:
    """Convert a model to a smaller KV cache, without training but for `polish`.

    Args:
        model: A folder, a hub name, an open checkpoint, or a model of transformers.
        kv_ratio: Share of the model's own KV cache to keep at most (default: a half, where neither
            `kv_heads` nor `kv_bytes` is given).
        data: Text to calibrate on, and to measure on a part of it that is held out.
        output_dir: Folder for the converted checkpoint; without one it lasts as long as the result.
        eval_data: Another text to measure on.
        tokenizer: Of a model of transformers; by default that of the checkpoint which it was loaded
            from.
        **options: As those of `headfold convert`.

    Returns:
        Losses and sizes before and after, and the checkpoint, which can be loaded, saved and
            exported.

    Raises:
        ConfigError: For what is wrong with model or options, before weights are read. Likewise
            DataError of texts, RecipeError of recipes, OutputError of the folder.
    """
    _check_tokenizer(tokenizer, model)
    if kv_ratio is None and options.get("kv_heads") is None and options.get("kv_bytes") is None:
        kv_ratio = 0.5
    folder, temporary = export_folder(output_dir, "converted")
    text, eval_text = _text_source(data, options), _text_source(eval_data, options)
    with _source(model, tokenizer) as source:
        task = Convert(
            ConvertOptions(
                model=source,
                kv_ratio=kv_ratio,
                out=folder,
                calibration_data=text,
                eval_data=eval_text,
                **options,
            )
        )
        if task.several:
            raise ConfigError(
                "kv_ratio: one checkpoint is made at a time; give one ratio, and call again for "
                "others"
            )
        task.estimate.check()
        record: dict[str, Any] = dict(task.run())
    # Where `output_dir` has several ratios it is a folder in there
    return ConversionResult(record, Path(record["out"]), temporary)


def evaluate(
    model: ModelSource,
    original: ModelSource | None = None,
    data: Data = None,
    *,
    eval_data: Data = None,
    tokenizer: Any = None,
    **options: Unpack[EvaluateArguments],
) -> EvaluationResult:
    """Measure a model, and compare it with its original if that is given.

    Args:
        model: What is measured.
        original: What it was converted from.
        data: Text whose held-out part is measured on, as `convert` does.
        eval_data: Text that is measured on as a whole.
        tokenizer: Of models of transformers.
        **options: As those of `headfold evaluate`.

    Returns:
        Held-out loss, perplexity and KL, KV bytes planned and measured, tokens per second.
    """
    _check_tokenizer(tokenizer, model, original)
    with contextlib.ExitStack() as stack:
        evaluate_options = EvaluateOptions(
            checkpoint=stack.enter_context(_source(model, tokenizer)),
            original=None
            if original is None
            else stack.enter_context(_source(original, tokenizer)),
            data=_text_source(data, options),
            eval_data=_text_source(eval_data, options),
            **options,
        )
        return EvaluationResult(Evaluate(evaluate_options).run())


def inspect(
    model: ModelSource,
    kv_ratio: str | float | Sequence[float] | None = None,
    data: Data = None,
    *,
    eval_data: Data = None,
    tokenizer: Any = None,
    **options: Unpack[InspectArguments],
) -> InspectionResult:
    """Show which heads of a model matter, which are alike, and what recipes cost at each ratio.

    Args:
        model: What is looked at.
        kv_ratio: Shares of the model's KV cache (default: 0.5 and 0.25).
        data: Text to calibrate on, and to measure on a part of it that is held out.
        eval_data: Another text to measure on.
        tokenizer: Of a model of transformers.
        **options: As those of `headfold inspect`.
    """
    _check_tokenizer(tokenizer, model)
    text, eval_text = _text_source(data, options), _text_source(eval_data, options)
    with _source(model, tokenizer) as source:
        inspect_options = InspectOptions(
            checkpoint=source,
            kv_ratio=kv_ratio,
            calibration_data=text,
            eval_data=eval_text,
            **options,
        )
        return InspectionResult(Inspect(inspect_options).run())


def export(
    model: ModelSource,
    target: str = "auto",
    output_dir: str | Path | None = None,
    *,
    tokenizer: Any = None,
    **options: Unpack[ExportArguments],
) -> ExportResult:
    """Write a model in a format that engines load, with a model card.

    Args:
        model: What is exported.
        target: gqa, per_layer, vllm, gguf, transformers or phi; auto: the best for the plan.
        output_dir: Folder for the export; without one it lasts as long as the result.
        tokenizer: Of a model of transformers.
        **options: As those of `headfold export`.

    Raises:
        TargetError: If the target cannot hold the plan. Likewise LargerCacheError, ConfigError,
            OutputError.
    """
    _check_tokenizer(tokenizer, model)
    with _source(model, tokenizer) as source:
        return export_to(source, target, output_dir, **options)


def load(
    model: str | Path | Checkpoint, dtype: torch.dtype | str | None = None, device: str = "cpu"
) -> Any:
    """Load a checkpoint, converted or not, in evaluation mode.

    Args:
        model: A folder, a hub name, or an open checkpoint.
        dtype: Of the weights; None: what they are stored in.
        device: That they are loaded to.
    """
    return Checkpoint.open(model).load(dtype, device)


def _check_tokenizer(tokenizer: Any, *models: ModelSource | None) -> None:
    """Raise ConfigError for a tokenizer that none of the models takes."""
    if tokenizer is not None and not any(isinstance(model, PreTrainedModel) for model in models):
        raise ConfigError(
            "tokenizer: only a model in memory takes one; this model has that of its folder"
        )


@contextlib.contextmanager
def _source(model: ModelSource, tokenizer: Any) -> Generator[str | Path | Checkpoint]:
    """Yield a model as tasks take it; one of transformers is in a folder while the body runs."""
    if not isinstance(model, PreTrainedModel):
        yield model
        return
    if tokenizer is None:
        if not model.name_or_path:
            raise ConfigError(
                "tokenizer: this model was not loaded from a checkpoint; give its tokenizer"
            )
        tokenizer = Checkpoint.open(model.name_or_path).tokenizer
    name = _name_of(model)
    with TemporaryDirectory(prefix="headfold-") as folder:
        local = model.name_or_path and Path(name).is_dir()
        # What it was converted from; its plan is written anew
        note = files.note_of(name) if local else _note_on_hub(model)
        record = {key: value for key, value in note.items() if key not in files.PLAN_FIELDS}
        path = files.save(model, Path(folder) / Path(name).name, tokenizer, record=record)
        write_source_note(path, Path(name).resolve() if local else name)
        yield path


def _note_on_hub(model: PreTrainedModel) -> Mapping[str, Any]:
    """Return the note in the repository of a model in memory; empty if that is not reached."""
    if model.name_or_path:
        # The model is in memory: its source may be gone
        with contextlib.suppress(CheckpointError):
            return files.note_of(fetched(model.name_or_path, [files.PLAN_FILE], "note"))
    return {}


def _name_of(model: PreTrainedModel) -> str:
    """Return what a model was loaded from, or its type."""
    return model.name_or_path or str(model.config.model_type)


def _text_source(data: Data, options: Mapping[str, Any]) -> str | None:
    """Return texts as tasks take them.

    Those in memory are written to a file of the cache, once: records name it, and commands that
    they advise read it again.
    """
    if data is None or isinstance(data, str):
        return data
    if isinstance(data, Path):
        return str(data)
    field = options.get("text_field", "text")
    folder = cache_folder() / "texts"
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with NamedTemporaryFile("wb", dir=folder, suffix=".part", delete=False) as stream:
        part = Path(stream.name)
        try:
            for text in _strings(data, field):
                line = (json.dumps({field: text}) + "\n").encode()
                digest.update(line)
                stream.write(line)
        except BaseException:
            part.unlink()
            raise
    file = folder / f"{digest.hexdigest()[:16]}.jsonl"
    if file.exists():
        part.unlink()
    else:
        part.rename(file)
    return str(file)


def _strings(data: Iterable[Any], field: str) -> Iterator[str]:
    """Yield the documents of a list of strings or of a dataset.

    Raises:
        DataError: For anything else.
    """
    if isinstance(data, Mapping):
        names = [str(name) for name in cast(Mapping[Any, Any], data)]
        raise DataError(
            f"data: expected a source of text, a list of strings, or a dataset, got {len(names)} "
            f"entries by name ({', '.join(names[:4])}); give one of them, e.g. "
            f"data[{next(iter(names), 'train')!r}]"
        )
    if field in (getattr(data, "column_names", None) or ()):
        yield from data[field]  # type: ignore[index]
        return
    for index, text in enumerate(data):
        if not isinstance(text, str):
            columns = getattr(data, "column_names", None)
            got = f"columns {columns}" if columns else f"{type(text).__name__} as item {index}"
            raise DataError(
                "data: expected a source of text, a list of strings, or a dataset with a column "
                f"{field!r}, got {got}; name its column as text_field"
            )
        yield text
