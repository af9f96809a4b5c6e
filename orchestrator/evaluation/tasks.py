"""Models on tasks of lm-evaluation-harness, which calls them in whatever format they were saved."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TextIO

from attention.base.messages import reason
from attention.base.progress import ProgressStage, stage
from orchestrator.config.schema import ConfigError
from orchestrator.evaluation.ruler import PREFIX, ruler_configs
from orchestrator.evaluation.task_files import TaskConfig, check_installed, task_specs

Scores = dict[str, dict[str, float]]
"""Metrics of each task by name: `{"which_name": {"acc": 0.6, "acc_stderr": 0.06, "items": 64}}`."""

_BATCH = 8
_SEED = 1234  # of the examples that a task shows first, where it shows some: the harness's own
_BOOTSTRAP = 100  # draws for standard errors that have no formula


class HarnessTasks:
    """Tasks with their data, loaded before any model is.

    Args:
        names: As `task_specs` takes them, or `orchestrator.evaluation.ruler.RULER_TASKS`.
        tokenizer: Of the models; needed by the latter alone.
        lengths: Context lengths that these are generated at.
        seed: Of these.

    Attributes:
        metrics: Names of the metrics of each task.

    Raises:
        ConfigError: For a name that is not known, a file that cannot be used, and data that cannot
            be loaded, as from a hub that is not reached.
    """

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: Any = None,
        lengths: Sequence[int] = (),
        seed: int = 0,
    ) -> None:
        specs = task_specs(names)
        check_installed()
        generated = [name for name in specs if isinstance(name, str) and name.startswith(PREFIX)]
        specs = [spec for spec in specs if spec not in generated]
        specs += ruler_configs(generated, tokenizer, lengths, seed)
        with _quiet():
            from lm_eval.tasks import TaskManager

            self._tasks: list[Any] = []
            default = _all_tasks() if any(isinstance(spec, str) for spec in specs) else None
            for spec in specs:
                if isinstance(spec, str) and default is not None and spec not in default.all_tasks:
                    raise ConfigError(
                        f"tasks: {spec!r} is no folder here and no name that the harness knows; "
                        "`demo` is bundled, `lm-eval ls tasks` lists its own"
                    )
                manager = default if isinstance(spec, str) else TaskManager(include_defaults=False)
                self._tasks += _load(manager, spec)
        self.metrics = {str(task.task_name): list(task.aggregation()) for task in self._tasks}

    def scores(self, model: Any, tokenizer: Any, batch_size: int = _BATCH) -> Scores:
        """Return what `model` reaches, on the device and in the dtype that it has.

        Raises:
            ConfigError: For a task whose templates do not fit its data.
        """
        from jinja2.exceptions import TemplateError

        screen = sys.stderr
        with stage("tasks", 0, "requests") as progress, _quiet():
            import lm_eval
            from lm_eval.models import huggingface
            from lm_eval.tasks import TaskManager

            harness: Any = lm_eval
            adapter: Any = huggingface  # its classes have decorators that hide their parameters
            wrapped = adapter.HFLM(
                pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size
            )
            _count_requests(wrapped, progress, screen)
            try:
                results = harness.simple_evaluate(
                    wrapped,
                    tasks=self._tasks,
                    task_manager=TaskManager(include_defaults=False),  # they are loaded already
                    bootstrap_iters=_BOOTSTRAP,
                    log_samples=False,
                    fewshot_random_seed=_SEED,
                    random_seed=None,
                    numpy_random_seed=None,
                    torch_random_seed=None,
                )
            except TemplateError as error:
                raise ConfigError(
                    f"tasks: a template does not fit its data: {reason(error)}"
                ) from None
        counts = results.get("n-samples", {})
        return {
            name: _metrics_of(results["results"][name], counts.get(name, {}))
            for name in self.metrics
        }


def _count_requests(wrapped: Any, progress: ProgressStage, screen: TextIO) -> None:
    """Show how many of its requests a model of the harness has answered, instead of its bars.

    Args:
        wrapped: The model.
        progress: Counts them.
        screen: Where progress is shown, from which `_quiet` keeps the harness.
    """
    from lm_eval.api.model import CacheHook

    class Counter(CacheHook):
        def add_partial(self, attr: str, req: Iterable[Any], res: Any) -> None:
            progress.step()

    def counted(answer: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
        def answer_and_count(requests: Sequence[Any]) -> Any:
            progress.total = (progress.total or 0) + len(requests)
            with contextlib.redirect_stderr(screen):
                return answer(requests, disable_tqdm=True)

        return answer_and_count

    likelihoods = wrapped._loglikelihood_tokens

    def likelihoods_without_bar(
        requests: Sequence[Any], disable_tqdm: bool = True, override_bs: int | None = None
    ) -> Any:
        return likelihoods(requests, disable_tqdm=True, override_bs=override_bs)

    wrapped.set_cache_hook(Counter(None))
    # Perplexity tasks show its bar all the same
    wrapped._loglikelihood_tokens = likelihoods_without_bar
    for name in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
        setattr(wrapped, name, counted(getattr(wrapped, name)))


def _load(manager: Any, spec: str | TaskConfig) -> list[Any]:
    name = spec if isinstance(spec, str) else spec["task"]
    try:
        return list(manager.load([spec])["tasks"].values())
    except Exception as error:  # of data sets, the hub's client and the harness: of a dozen types
        raise ConfigError(
            f"tasks: {name!r} cannot be loaded: {type(error).__name__}: {reason(error)}; what is "
            "not on this machine must be fetched from the hub before (HF_HUB_OFFLINE unset), or be "
            "given as a folder of task files with their data"
        ) from None


@cache
def _all_tasks() -> Any:
    """Return the harness's own tasks; finding their names in thousands of files takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _metrics_of(result: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, float]:
    """Return the finite metrics of a task.

    `acc,none` is the metric `acc`; one of another filter is named with it.
    """
    scores: dict[str, float] = {}
    for key, value in result.items():
        name, _, filter_name = key.partition(",")
        if filter_name and isinstance(value, (int, float)) and math.isfinite(value):
            scores[name if filter_name == "none" else f"{name}.{filter_name}"] = float(value)
    if "effective" in counts:
        scores["items"] = counts["effective"]
    return scores


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Run the harness without its log and its bars, and in a sandbox.

    Its templates reach nothing but their data.
    """
    import lm_eval.utils as harness
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    logger = logging.getLogger("lm_eval")
    level = logger.level
    environment = harness.env
    sandbox = ImmutableSandboxedEnvironment(
        undefined=environment.undefined,
        keep_trailing_newline=environment.keep_trailing_newline,
    )
    sandbox.filters.update(environment.filters)
    logger.setLevel(logging.CRITICAL)
    harness.env = sandbox
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        harness.env = environment
        logger.setLevel(level)
