"""`headfold evaluate`: measure a checkpoint, the original and a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from torch import Tensor
from transformers import PreTrainedModel

from attention.base.progress import stage
from attention.base.text import compact
from attention.base.timing import Phases, clock
from attention.cache_formats import (
    CacheFormatError,
    CachePair,
    FormatRecord,
    format_record,
    read_pairs,
)
from attention.checkpoint import Checkpoint
from attention.engine_cache import engine_cache, with_engine_heads
from attention.io import checkpoint as checkpoint_files
from attention.io.precision import cast_weights, round_weights
from attention.modeling.model_classes import plan_of
from orchestrator import checkpoints
from orchestrator.config.options import EvaluateOptions
from orchestrator.config.parsing import read_cache_format
from orchestrator.config.schema import ConfigError
from orchestrator.evaluation.extras import Extras, PreparedExtras
from orchestrator.evaluation.generations import read_prompts
from orchestrator.evaluation.long_context import NUM_TEXTS
from orchestrator.reporting.evaluation_tables import print_evaluation, print_extras
from orchestrator.resources.size import Size
from orchestrator.resources.time import matmul_rate
from orchestrator.serving.cache_types import (
    SCORED_TOKENS,
    CacheTypesRecord,
    cache_types_record,
    read_cache_types,
)
from orchestrator.serving.speed import SpeedRecord, engine_speed, is_export
from orchestrator.serving.tables import print_cache_types, print_speed
from orchestrator.tasks.task import Task, advise_text, require
from trainers.evaluation import (
    CachedTeacher,
    Evaluation,
    decode_speed,
    evaluate,
    perplexity,
)
from trainers.rounded_caches import RoundedCacheRow, measure_rounded
from trainers.text.data import LoadedTexts, Texts

CHECKPOINT, ORIGINAL, BASELINE = "checkpoint", "original", "baseline"


class EvaluationRecord(TypedDict):
    """The JSON of `headfold evaluate`.

    Losses and KL are in nats per token, bytes are KV bytes per token.
    """

    checkpoint: str
    original: str | None
    loss: float
    original_loss: float | None
    loss_increase: float | None
    loss_increase_stderr: NotRequired[float | None]
    """Standard error of the increase over the held-out sequences."""
    perplexity: float
    original_perplexity: NotRequired[float]
    baseline_loss_increase: NotRequired[float]
    baseline_loss_increase_stderr: NotRequired[float | None]
    eval_data: str
    sequence_length: int
    baseline: str | None
    baseline_loss: float | None
    kl: float | None
    eval_tokens: int
    notes: NotRequired[list[str]]
    plan: Mapping[str, Any]
    plan_digest: str
    dtype: str
    seed: int
    recipe: Mapping[str, Any] | None
    kv_ratio_of: str
    """The model whose cache `kv_ratio` is a share of."""
    kv_ratio: float
    kv_bytes_per_token: int
    cache_bytes_measured: int
    cache_tokens: int
    parameters: int
    prefill_tokens_per_second: NotRequired[float]
    decode_tokens_per_second: NotRequired[float]
    engine_cache: NotRequired[FormatRecord]
    """With `--cache-format`: the format in which checkpoint and baseline were measured; the share
    is of the original's cache in 16 bits, or of the checkpoint's."""
    rounded_caches: NotRequired[list[RoundedCacheRow]]
    """With `--cache-types`: the checkpoint with its cache in each of these formats; the increase is
    relative to the original with a cache that is not rounded, without an original to the
    checkpoint."""
    seconds: dict[str, float]


_Measured = EvaluationRecord | SpeedRecord | CacheTypesRecord


class Evaluate(Task[EvaluateOptions, _Measured]):
    """Held-out loss, increase and KL against the original, KV bytes, tokens per second.

    With an engine: only speed and the number of sequences that fit
    (`orchestrator.serving.speed`); with formats of its cache these in each of them, and the loss
    (`orchestrator.serving.cache_types`).
    """

    def check(self) -> None:
        if self.options.engine is not None:
            _refuse_with_engine(self.options, self.rehearsal)
            if self.options.cache_types is not None:
                require(self.cache_types, self.models, self.positions, self.dtype, self.tokenizer)
                for pair in self.cache_types:
                    _check_heads("cache_types", pair, self.models)
            return
        if self.options.context_texts is not None and self.options.context_lengths is None:
            raise ConfigError(
                "context_texts: of how many texts a line is hidden in at each context length; add "
                "--context-lengths, or leave it out"
            )
        if self.options.engine_python is not None:
            raise ConfigError(
                "engine_python: is of a measurement in an engine; add --engine, or leave it out"
            )
        if self.options.cache_memory != EvaluateOptions.cache_memory:
            raise ConfigError(
                "cache_memory: is of a measurement in an engine; add --engine, or leave it out"
            )
        if self.options.trust_remote_code:
            raise ConfigError(
                "trust_remote_code: only an engine runs Python files of an export; add --engine, "
                "or leave it out"
            )
        require(self.extras, self.models, self.positions, self.dtype, self.tokenizer)
        require(self.cache_facts)
        if self.rounded_pairs and self.cache_pair is not None:
            raise ConfigError(
                "cache_types: measured next to a cache in 16 bits; leave out --cache-format, or "
                "add its format to the list"
            )
        for pair in self.rounded_pairs:
            _check_heads("cache_types", pair, {CHECKPOINT: self.models[CHECKPOINT]})

    @cached_property
    def cache_pair(self) -> CachePair | None:
        """The formats of the cache to measure with."""
        text = self.options.cache_format
        return None if text is None else read_cache_format(text)

    @cached_property
    def cache_facts(self) -> FormatRecord | None:
        """The size of that cache.

        Raises:
            ConfigError: For a model whose heads the engine does not support in this format.
        """
        if self.cache_pair is None:
            return None
        rounded = {key: model for key, model in self.models.items() if key != ORIGINAL}
        _check_heads("cache_format", self.cache_pair, rounded)
        plans = {key: model.plan for key, model in self.models.items()}
        return format_record(self.cache_pair, plans[CHECKPOINT], plans.get(ORIGINAL))

    @cached_property
    def rounded_pairs(self) -> tuple[CachePair, ...]:
        """The further formats of the cache to measure the checkpoint with, without an engine."""
        text = self.options.cache_types
        try:
            return () if text is None else read_pairs(text)
        except CacheFormatError as error:
            raise ConfigError(f"cache_types: {error}") from None

    @cached_property
    def cache_types(self) -> tuple[CachePair, ...]:
        """The formats of the cache to measure with in an engine."""
        options = self.options
        assert options.engine is not None and options.cache_types is not None
        return read_cache_types(options.cache_types, options.engine)

    @cached_property
    def models(self) -> dict[str, Checkpoint]:
        """The checkpoints to measure, by role."""
        options = self.options
        named = {
            CHECKPOINT: options.checkpoint,
            ORIGINAL: options.original,
            BASELINE: options.baseline,
        }
        sources = {key: source for key, source in named.items() if source is not None}
        for key, source in sources.items():
            checkpoints.check_named(source, key)
            if options.engine is not None and isinstance(source, str | Path) and is_export(source):
                raise ConfigError(
                    f"{key}: {str(source)!r} is an export; --cache-types takes the checkpoint that "
                    "it was exported from"
                )
        return {
            key: checkpoints.open_model(
                source, key, dequantize=options.dequantize, weights=not self.rehearsal
            )
            for key, source in sources.items()
        }

    @cached_property
    def extras(self) -> Extras:
        """Measurements other than loss and cache."""
        tasks, prompts = self.options.tasks, self.options.prompts
        if isinstance(tasks, str):
            tasks = [name.strip() for name in tasks.split(",")]
        return Extras(
            tuple(tasks or ()),
            read_prompts(prompts)
            if prompts is None or isinstance(prompts, str)
            else tuple(prompts),
            self.options.context_lengths,
        )

    @cached_property
    def positions(self) -> int:
        """Positions that all models take."""
        length, first = self.options.sequence_length, self.models[CHECKPOINT]
        for key, model in self.models.items():
            checkpoints.open_checkpoint(model, key, sequence_length=length)
            checkpoints.check_same_vocabulary(model, first, key)
        return min(model.geometry.max_positions for model in self.models.values())

    @cached_property
    def dtype(self) -> str:
        return checkpoints.written_dtype(self.models[CHECKPOINT], self.options.dtype)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the original, or else of the checkpoint.

        Losses per token cannot be compared across tokenizers, so all models must use its tokens. A
        model without a tokenizer is assumed to.
        """
        first = ORIGINAL if ORIGINAL in self.models else CHECKPOINT
        tokenizer = checkpoints.load_tokenizer(self.models[first])
        for key, model in self.models.items():
            if key != first:
                checkpoints.check_same_tokens(tokenizer, model, key, first)
        return tokenizer

    @cached_property
    def texts(self) -> LoadedTexts:
        """The held-out text."""
        return self._cut(self.options.eval_tokens, self.options.sequence_length)

    @property
    def _sources(self) -> Texts:
        options = self.options
        return Texts(options.data, options.eval_data, options.text_field, options.seed)

    def _cut(self, tokens: int | None, length: int | None) -> LoadedTexts:
        return self._sources.load(
            self.tokenizer,
            self.positions,
            eval_tokens=tokens,
            sequence_length=length,
            calibrate=False,
        )

    @cached_property
    def prepared(self) -> PreparedExtras:
        """Additional measurements, with their data."""

        def held_out(length: int) -> Tensor:
            count = self.options.context_texts or NUM_TEXTS
            return self._cut(count * length, length).held_out

        return self.extras.prepare(self.tokenizer, self.positions, held_out, self.options.seed)

    def announce(self) -> None:
        if self.options.engine is None or self.options.cache_types is not None:
            advise_text(self.options.data, self.options.eval_data)

    def rehearse(self) -> Iterable[Mapping[str, str]]:
        self.announce()
        sequences, source = self.texts.held_out, self._sources.eval_source
        require(self.prepared)
        working = checkpoints.dtype_of(checkpoints.working_dtype(self.dtype, self.options.device))
        sizes = [Size.of(model.config).total for model in self.models.values()]
        weights = working.itemsize * sum(sizes) / 2**30
        operations = 2.0 * sum(sizes) * sequences.numel()
        names = [
            name for name in ("tasks", "prompts", "context_lengths") if getattr(self.extras, name)
        ]
        if self.rounded_pairs:
            names.append(f"the checkpoint in {len(self.rounded_pairs)} cache format(s)")
        more = f", and {', '.join(names)}" if names else ""
        return [
            {
                "measures": f"held-out loss of {len(sizes)} model(s) on "
                f"{compact(sequences.numel())} tokens of {source} each, in sequences of "
                f"{sequences.shape[1]}{more}",
                "memory": f"{weights:.1f} GiB of weights in {str(working).removeprefix('torch.')}",
                "work": f"{operations:.2g} operations for the losses; about "
                f"{clock(operations / matmul_rate(working))} here on the CPU",
            }
        ]

    def run(self) -> _Measured:
        """Measure.

        Raises:
            ConfigError: For what a user can mend. Likewise DataError of texts, EngineError of
                engines.
            EngineFailure: If the engine fails.
        """
        self.check()
        if self.options.engine is not None:
            return self._in_engine(self.options.engine)
        return self._measure()

    def _in_engine(self, engine: str) -> SpeedRecord | CacheTypesRecord:
        options = self.options
        memory = options.cache_memory * 2**30
        if options.cache_types is not None:
            texts = self._cut(options.eval_tokens or SCORED_TOKENS, options.sequence_length)
            return cache_types_record(
                self.models,
                self.cache_types,
                texts.held_out,
                texts.facts["eval_data"],
                engine=engine,
                python=options.engine_python,
                length=options.context_lengths,
                tokens=options.speed_tokens,
                memory=memory,
                dtype=options.dtype,
                seed=options.seed,
            )
        return engine_speed(
            str(options.checkpoint),
            None if options.original is None else str(options.original),
            engine=engine,
            python=options.engine_python,
            lengths=options.context_lengths or "max",
            tokens=options.speed_tokens,
            memory=memory,
            dtype=options.dtype,
            seed=options.seed,
            trust_remote_code=options.trust_remote_code,
        )

    def _measure(self) -> EvaluationRecord:
        options, phases, models = self.options, Phases(), self.models
        recipe = checkpoint_files.note_of(models[CHECKPOINT].folder).get("recipe")
        with phases("data"):
            texts, prepared = self.texts, self.prepared
            sequences = texts.held_out
        with phases("load"):
            model = self._load(CHECKPOINT)
            teacher = self._load(ORIGINAL) if ORIGINAL in models else None
            reference = None if teacher is None else CachedTeacher(teacher)
        with phases("evaluate"):
            round_weights(model, checkpoints.dtype_of(self.dtype))
            engine_model = self._engine_heads(model)
            with self._rounding(engine_model):
                scored = evaluate(engine_model, sequences, teacher=reference)
            original_scored = None if reference is None else evaluate(reference, sequences)
            comparison: dict[str, Any] = {
                "loss_increase": None,
                "perplexity": perplexity(scored.loss),
            }
            if original_scored is not None:
                comparison = scored.compared(original_scored)
        rounded = []
        if self.rounded_pairs:
            with phases("cache formats"):
                rounded = self._rounded(model, sequences, reference, original_scored or scored)
        del reference  # and the hidden states of the original
        with phases("extras"):
            with self._rounding(engine_model):
                measured = {CHECKPOINT: prepared.measure(engine_model)}
            if teacher is not None:
                measured[ORIGINAL] = prepared.measure(teacher)
        baseline_loss = None
        if BASELINE in models:
            with phases("baseline"):
                baseline = self._load(BASELINE)
                round_weights(baseline, checkpoints.dtype_of(self.dtype))
                other = self._engine_heads(baseline)
                with self._rounding(other):
                    baseline_scored = evaluate(other, sequences)
                    measured[BASELINE] = prepared.measure(other)
                baseline_loss = baseline_scored.loss
                if original_scored is not None:
                    increase = baseline_scored.compared(original_scored)
                    comparison |= {
                        f"baseline_{name}": increase[name]
                        for name in ("loss_increase", "loss_increase_stderr")
                    }
                del other, baseline
        heads, kind = _reference_cache(models[CHECKPOINT], model, teacher)
        cast_weights(model, checkpoints.dtype_of(self.dtype))
        record: Any = {
            "checkpoint": models[CHECKPOINT].name,
            "original": models[ORIGINAL].name if ORIGINAL in models else None,
            "loss": scored.loss,
            "original_loss": None if original_scored is None else original_scored.loss,
            **comparison,
            **texts.facts,
            "baseline": models[BASELINE].name if BASELINE in models else None,
            "baseline_loss": baseline_loss,
            "kl": scored.kl,
            "eval_tokens": scored.tokens,
            **scored.noted,
            "plan": plan_of(model).to_dict(),
            "plan_digest": plan_of(model).digest,
            "dtype": self.dtype,
            "seed": options.seed,
            "recipe": recipe,
            "kv_ratio_of": kind,
            **checkpoints.cache_facts(model, heads),
        }
        if self.cache_facts is not None:
            record |= {"engine_cache": self.cache_facts}
        if rounded:
            record |= {"rounded_caches": rounded}
        if options.speed_tokens:
            with phases("speed"):
                length = sequences.shape[1]
                prompt = sequences[:1, : max(1, length - options.speed_tokens)]
                speed = decode_speed(model, prompt, min(options.speed_tokens, length - 1))
            record |= {
                "prefill_tokens_per_second": speed.prefill,
                "decode_tokens_per_second": speed.decode,
            }
        return record | prepared.record(measured) | {"seconds": dict(phases)}

    def _rounded(
        self,
        model: PreTrainedModel,
        sequences: Tensor,
        reference: CachedTeacher | None,
        exact: Evaluation,
    ) -> list[RoundedCacheRow]:
        """Return the losses of the checkpoint in the further formats of its cache.

        Args:
            model: The checkpoint.
            sequences: The held-out text.
            reference: The original, for the KL.
            exact: The evaluation that losses are compared with.
        """
        plans = {key: opened.plan for key, opened in self.models.items()}
        engine_model = _with_engine_heads("cache_types", model)
        rows: list[RoundedCacheRow] = []
        with stage("cache formats", len(self.rounded_pairs)) as progress:
            for pair in self.rounded_pairs:
                facts = format_record(pair, plans[CHECKPOINT], plans.get(ORIGINAL))
                rows.append(measure_rounded(facts, engine_model, sequences, exact, reference))
                progress.step()
        return rows

    def _engine_heads(self, model: PreTrainedModel) -> PreTrainedModel:
        return model if self.cache_pair is None else _with_engine_heads("cache_format", model)

    def _rounding(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        return engine_cache(model, self.cache_pair)

    def _load(self, key: str) -> PreTrainedModel:
        return checkpoints.load_working(self.models[key], self.dtype, self.options.device)

    def show(self, record: _Measured) -> None:
        if "cache_types" in record:
            print_cache_types(record)
            return
        if "models" in record:
            print_speed(record)
            return
        print_evaluation(record)
        print_extras(record)


def _with_engine_heads(option: str, model: PreTrainedModel) -> PreTrainedModel:
    try:
        return with_engine_heads(model)
    except CacheFormatError as error:
        raise ConfigError(f"{option}: {error}") from None


def _check_heads(option: str, pair: CachePair, models: Mapping[str, Checkpoint]) -> None:
    """Raise ConfigError for a model whose heads an engine does not hold in a format."""
    for key, model in models.items():
        try:
            pair.bytes_per_token(model.plan)
        except CacheFormatError as error:
            raise ConfigError(f"{option}: {key}: {error}") from None


def _refuse_with_engine(options: EvaluateOptions, rehearsal: bool) -> None:
    """Raise ConfigError for measurements that are not possible in an engine."""
    others: Sequence[tuple[str, Any]] = [
        ("--tasks", options.tasks),
        ("--prompts", options.prompts),
        ("--context-texts", options.context_texts),
        ("--baseline", options.baseline),
        ("--dry-run", rehearsal or None),
        ("--dequantize", options.dequantize or None),
        ("--cache-format", options.cache_format),
        ("--device", None if options.device == "auto" else options.device),
    ]
    if options.cache_types is None:  # which measure losses too
        others = [
            *others,
            ("--data", options.data),
            ("--eval-data", options.eval_data),
            ("--eval-tokens", options.eval_tokens),
            ("--sequence-length", options.sequence_length),
        ]
    if refused := [name for name, value in others if value is not None]:
        raise ConfigError(
            f"engine: the speed in an engine is measured alone; leave out {', '.join(refused)}, or "
            "run evaluate again without --engine"
        )


def _reference_cache(
    checkpoint: Checkpoint, model: PreTrainedModel, original: PreTrainedModel | None
) -> tuple[float, str]:
    """Return the KV heads that a KV ratio is a share of, and a description of their model."""
    dim = plan_of(model).head_dim
    if original is not None:
        cached = plan_of(original)
        return cached.kv_heads * cached.head_dim / dim, "the original's cache"
    if (recorded := checkpoint_files.original_heads(checkpoint.folder, dim)) is not None:
        return recorded, "the cache of the model that it was converted from"
    return plan_of(
        model
    ).kv_heads, "its own cache, as no other is known (give an original to compare with)"
