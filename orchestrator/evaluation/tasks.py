"""Models on tasks of lm-evaluation-harness, which calls them as they are, in whatever format they were saved."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from attention.base.messages import reason
from orchestrator.config.schema import ConfigError
from orchestrator.evaluation.task_files import check_installed, task_specs

Scores = dict[str, dict[str, float]]
"""Metrics of each task by name: `{"which_name": {"acc": 0.6, "acc_stderr": 0.06, "items": 64}}`."""

BATCH = 8
SEED = 1234  # of the examples that a task shows first, where it shows some: the harness's own
BOOTSTRAP = 100  # draws for standard errors that have no formula


class HarnessTasks:
    """Tasks with their data, loaded before any model is. `metrics`: those of each task by name.

    Raises ConfigError for a name that is not known, a file that cannot be used, and data that cannot be had, as from a
    hub that is not reached.
    """

    def __init__(self, asked: Sequence[str]) -> None:
        specs = task_specs(asked)
        check_installed()
        with _quiet():
            from lm_eval.tasks import TaskManager

            self._tasks: list[Any] = []
            known = _all_tasks() if any(isinstance(spec, str) for spec in specs) else None
            for spec in specs:
                if isinstance(spec, str) and known is not None and spec not in known.all_tasks:
                    raise ConfigError(
                        f"tasks: {spec!r} is no folder here and no name that the harness knows; `demo` comes along, "
                        "`lm-eval ls tasks` lists its own"
                    )
                manager = known if isinstance(spec, str) else TaskManager(include_defaults=False)
                self._tasks += self._load(manager, spec)
        self.metrics = {str(task.task_name): list(task.aggregation()) for task in self._tasks}

    def _load(self, manager: Any, spec: str | dict[str, Any]) -> list[Any]:
        name = spec if isinstance(spec, str) else spec["task"]
        try:
            return list(manager.load([spec])["tasks"].values())
        except Exception as error:  # of data sets, the hub's client and the harness: of a dozen types
            raise ConfigError(
                f"tasks: {name!r} cannot be loaded: {type(error).__name__}: {reason(error)}; what is not on this "
                "machine must be fetched from the hub before (HF_HUB_OFFLINE unset), or be given as a folder of task "
                "files with their data"
            ) from None

    def scores(self, model: Any, tokenizer: Any, batch_size: int = BATCH) -> Scores:
        """What `model` reaches, on the device and in the dtype that it has. Raises ConfigError for a task whose
        templates do not fit its data."""
        from jinja2.exceptions import TemplateError

        with _quiet():
            import lm_eval
            from lm_eval.models import huggingface

            harness: Any = lm_eval
            adapter: Any = huggingface  # its classes are registered by decorators that hide their parameters
            wrapped = adapter.HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
            unseeded: dict[str, Any] = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))
            try:
                found = harness.simple_evaluate(
                    wrapped,
                    tasks=self._tasks,
                    task_manager=_no_manager(),
                    bootstrap_iters=BOOTSTRAP,
                    log_samples=False,
                    fewshot_random_seed=SEED,
                    **unseeded,
                )
            except TemplateError as error:
                raise ConfigError(f"tasks: a template does not fit its data: {reason(error)}") from None
        counts = found.get("n-samples", {})
        return {name: _metrics(found["results"][name], counts.get(name, {})) for name in self.metrics}


@cache
def _all_tasks() -> Any:
    """The harness's own tasks; looking for their names in its thousands of files takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _no_manager() -> Any:
    """The tasks are there already: none is to be looked for among the harness's thousands."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def _metrics(result: dict[str, Any], counted: dict[str, int]) -> dict[str, float]:
    """`acc,none` is the metric `acc`; one of another filter is named with it. Standard errors only where there are."""
    scores: dict[str, float] = {}
    for key, value in result.items():
        name, _, kept = key.partition(",")
        if kept and isinstance(value, (int, float)) and math.isfinite(value):
            scores[name if kept == "none" else f"{name}.{kept}"] = float(value)
    return scores | ({"items": counted["effective"]} if "effective" in counted else {})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness without its log, without its bars where nobody watches, and with templates that reach nothing but
    their data."""
    import lm_eval.utils as harness
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    logger, own = logging.getLogger("lm_eval"), harness.env
    level = logger.level
    sandbox = ImmutableSandboxedEnvironment(undefined=own.undefined, keep_trailing_newline=own.keep_trailing_newline)
    sandbox.filters.update(own.filters)
    logger.setLevel(logging.CRITICAL)
    harness.env = sandbox
    try:
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        harness.env = own
        logger.setLevel(level)
