"""`headfold estimate`: the resources of a search or a conversion, from configs alone.

Errors of the command or the configuration are reported before slow libraries are imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attention.base.messages import one_of
from attention.ratios import byte_share
from orchestrator.config.options import ConvertOptions, EstimateOptions
from orchestrator.config.parsing import BY_COMMA, NUMBERS
from orchestrator.config.schema import ConfigError, SearchConfig, read_search_config
from orchestrator.tasks.search import warn
from orchestrator.tasks.task import Task, print_by_topic

if TYPE_CHECKING:
    from attention.cache_formats import FormatRecord
    from orchestrator.conversion.request import ConversionRequest
    from orchestrator.resources.estimate import ConversionEstimate, Machine
    from orchestrator.resources.search_estimate import SearchEstimate
    from orchestrator.tasks.convert import Convert

OF_SEARCH = "a search: headfold estimate CONFIG [KEY=VALUE]..."
OF_CONVERSION = (
    "a conversion: headfold estimate --model M --kv-ratio 0.5,0.25 (or --kv-heads, --kv-bytes)"
)


class Estimation(Task[EstimateOptions, Mapping[str, Any]]):
    """The estimate of a search, or of conversions at one or several KV ratios."""

    def check(self) -> None:
        options = self.options
        if options.gpu is not None:
            _check_gpu(options.gpu, options)
        if self.search_config is None and (
            options.model is None or not (options.kv_ratio or options.kv_heads or options.kv_bytes)
        ):
            raise ConfigError(f"estimate: expected {OF_SEARCH}, or {OF_CONVERSION}")

    @cached_property
    def search_config(self) -> SearchConfig | None:
        """The configuration of the search; None for a conversion."""
        options = self.options
        config, changes = options.config, list(options.search or ())
        if config is None and changes and "=" not in changes[0]:
            config = Path(changes.pop(0))
        if config is None and changes:
            raise ConfigError(
                f"estimate: got {changes[0]!r}, which changes a configuration, and none was named; "
                f"for a setting of a conversion write --set {changes[0]}"
            )
        if config is None:
            return None
        of_conversion = (
            options.model,
            options.engine,
            options.kv_ratio,
            options.kv_heads,
            options.kv_bytes,
            options.tensor_parallel,
            options.overrides,
            options.polish,
            options.strict,
            options.calibration_tokens,
            options.eval_tokens,
            options.sequence_length,
            options.dequantize,
            options.dtype != "auto",
        )
        if any(of_conversion) or options.recipe != "auto":
            listed = f" ({config}); {BY_COMMA}" if NUMBERS.fullmatch(str(config)) else ""
            raise ConfigError(
                f"estimate: expected one of two, {OF_SEARCH}, or {OF_CONVERSION}; got parts of "
                f"both{listed}"
            )
        return read_search_config(config, changes)

    def run(self) -> Mapping[str, Any]:
        """Estimate; no text and no weights are read."""
        if self.search_config is not None:
            return self.search_estimate.record()
        records = [asdict(point) for point in self.points]
        for point, record in zip(self.points, records, strict=True):
            del record["tensor_parallel"]
            if point.tensor_parallel is not None:
                record["tensor_parallel"] = point.tensor_parallel.record()
        record = records[0] if len(records) == 1 else {"points": records}
        return {**record, "cache_formats": self.cache_formats}

    @cached_property
    def cache_formats(self) -> list[FormatRecord]:
        """The size of the unchanged checkpoint in the cache formats of engines."""
        from orchestrator.conversion.cache_choice import formats_alone

        return formats_alone(self.request.checkpoint, self.options.engine)

    @cached_property
    def search_estimate(self) -> SearchEstimate:
        """The estimate of the search on this machine, or on one with GPUs of `gpu_memory`."""
        from orchestrator.search.estimate import estimate_search, local_parallel
        from orchestrator.search.setup import SearchSetup, open_models
        from orchestrator.storage.paths import storage_path

        assert self.search_config is not None
        config, gpu = open_models(self.search_config, weights=False), self.options.gpu
        storage = storage_path(config.storage)
        parallel = local_parallel(config, self.options.gpus, gpu)
        setup = SearchSetup.open(config, weights=False, sequence_length=config.data.sequence_length)
        memory = None if self._elsewhere is None else self._elsewhere.memory
        return estimate_search(setup, storage, parallel=parallel, gpu_bytes=memory or None, gpu=gpu)

    @property
    def request(self) -> ConversionRequest:
        """The conversions, checked once."""
        return self.conversion.request

    @cached_property
    def conversion(self) -> Convert:
        """The run to estimate."""
        from orchestrator.tasks.convert import Convert

        arguments = self.options
        shared = [field.name for field in fields(ConvertOptions) if hasattr(arguments, field.name)]
        options = ConvertOptions(**{name: getattr(arguments, name) for name in shared})
        if self._elsewhere is not None or arguments.gpus == 0:
            options = replace(options, device="cpu")  # whose checks pass anywhere
        return Convert(options, config_only=True)

    @cached_property
    def _elsewhere(self) -> Machine | None:
        from orchestrator.resources.estimate import Machine

        options = self.options
        return Machine.named(options.device, options.gpus, options.gpu_memory, options.gpu)

    @cached_property
    def points(self) -> list[ConversionEstimate]:
        """The estimate of each conversion, by falling KV ratio."""
        from orchestrator.conversion.estimate import estimate_conversions

        return estimate_conversions(
            self.request,
            elsewhere=self._elsewhere,
            tensor_parallel=self.options.tensor_parallel,
            compared=self.conversion.compared,
        )

    def show(self, record: Mapping[str, Any]) -> None:
        if self.search_config is not None:
            words = self.search_estimate.describe(self.search_config, verbose=self.verbose)
            print_by_topic(words)
            warn(self.search_estimate.warnings)
            return
        from attention.cache_formats import format_advice

        budget = self.conversion.budget
        geometry = self.request.geometry
        requested = [byte_share(point.kv_ratio_asked, geometry) for point in self.points]
        for share in requested if budget is None else budget.shares:
            advice = format_advice(self.cache_formats, share, str(self.options.model))
            print(advice + "\n" * bool(advice), end="")
        for number, point in enumerate(self.points):
            print("\n" * bool(number), end="")
            print_by_topic(point.describe(verbose=self.verbose))

    def exit_code(self, record: Mapping[str, Any]) -> int:
        """Return 0.

        Raises:
            ConfigError: For processes that do not fit the requested GPU.
        """
        if self.search_config is not None:
            self.search_estimate.check()
        return 0


def _check_gpu(name: str, options: EstimateOptions) -> None:
    """Raise ConfigError for a type of GPU that is not known, and for one without a GPU."""
    from orchestrator.resources.accelerators import GIGABYTES, conversion_rate, memory_of

    if options.device == "cpu" or options.gpus == 0:
        raise ConfigError(
            f"gpu: {name} was named for a machine without a GPU; leave one of them out"
        )
    if conversion_rate(name) is None or memory_of(name) is None:
        known = [gpu for gpu in GIGABYTES if conversion_rate(gpu) is not None]
        raise ConfigError(one_of("gpu", known, name))
