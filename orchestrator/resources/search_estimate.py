"""Estimate of a search.

Trials and tokens are counted, memory and disk are sums, time is tokens over a rate that is
configured or measured here on random weights. The starts of processes are left out; the time of a
plan apart from its operations is not known in advance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attention.base.text import compact, gib
from attention.base.timing import duration
from orchestrator.config.schema import ConfigError, SearchConfig
from orchestrator.resources.accelerators import conversion_rate
from orchestrator.resources.disk import Storage
from orchestrator.resources.memory import available_bytes
from orchestrator.resources.processes import TRAINING_WORKER, Need, Needs
from orchestrator.resources.size import SPARE, SearchInputs
from orchestrator.resources.time import gpu_here, planning_seconds, training_rate
from trainers.jobs.write_rate import describe_checkpoints


@dataclass(frozen=True)
class SearchWork:
    """Work of a search, counted.

    Attributes:
        trials: Number of trials.
        probes: Number of those of them that are probes.
        trainings: Number of trainings of the promotion.
        tokens: Trained on if every rung stops as many trials as it should.
        tokens_most: Trained on if it stops none.
        tokens_promoted: Trained on in the promotion, which the two before include.
        tokens_measured: Measured on.
        search_phases: Number of DHA's search phases, which are before the trials.
        search_phase_tokens: Trained on in all of them.
    """

    trials: int
    probes: int
    trainings: int
    tokens: int
    tokens_most: int
    tokens_promoted: int
    tokens_measured: int
    search_phases: int
    search_phase_tokens: int

    @property
    def converted(self) -> int:
        """Trials that are converted, and may be trained."""
        return self.trials - self.probes


@dataclass(frozen=True)
class SearchTime:
    """Time of a search.

    Attributes:
        rate: Tokens per second of one worker; None where it is not known.
        rate_from: "configured", "measured here", or why it is not known.
        cpu_hours: Of search phases, trials and promotion.
        gpu_hours: Likewise.
        hours: On the wall, with as many trials at a time as there is room for.
        price: Of these hours.
    """

    rate: float | None
    rate_from: str
    cpu_hours: float | None
    gpu_hours: float | None
    hours: float | None
    price: float | None

    @classmethod
    def of_work(
        cls,
        inputs: SearchInputs,
        needs: Needs,
        work: SearchWork,
        parallel: int,
        gpu: str | None = None,
    ) -> SearchTime:
        """Estimate the time of the work, on GPUs of a named type or those here."""
        config = inputs.config
        gpu = gpu or config.resources.accelerator_type
        train = needs.resolved(TRAINING_WORKER, config.train)
        resources = config.resources
        length, configured = config.data.sequence_length, resources.tokens_per_second
        rate, source = training_rate(inputs.model, train, length, inputs.size, configured, gpu)
        if rate is None:
            return cls(
                rate=None, rate_from=source, cpu_hours=None, gpu_hours=None, hours=None, price=None
            )
        # A recipe's recovery may include a distillation, which needs the original model too. A
        # measured token goes forward only, a trained one backward as well, which is twice the work;
        # with distillation both go forward through the original model too
        share = (
            1 / 2 if any(each.distillation != "none" for each in inputs.trainings(train)) else 1 / 3
        )
        training = (work.tokens + work.tokens_measured * share) / rate / 3600
        promoting = work.tokens_promoted / rate / 3600
        promotion = config.promotion_train
        # Without a teacher, which is a quarter of the work of a distillation
        searching = work.search_phase_tokens / rate / 3600
        searching *= 3 / 4 if train.distillation != "none" else 1
        planning_rate = None
        if resources.trial_gpus and (kind := gpu or gpu_here()):
            planning_rate = conversion_rate(kind)
        driving = (
            planning_seconds(
                needs.conversions,
                inputs.size,
                config.search.num_samples,
                planning_rate,
                len(config.seeds),
            )
            / 3600
        )
        worked = training - promoting + searching
        cpu_hours = worked * train.cpus_per_worker + driving * max(1.0, resources.trial_cpus)
        cpu_hours += promoting * promotion.cpus_per_worker
        gpu_hours = worked * train.gpus_per_worker + driving * resources.trial_gpus
        gpu_hours += promoting * promotion.gpus_per_worker
        paid_hours = gpu_hours if train.gpus_per_worker else cpu_hours
        price = resources.price_per_hour
        return cls(
            rate=rate,
            rate_from=source,
            cpu_hours=cpu_hours,
            gpu_hours=gpu_hours,
            hours=((training - promoting) / train.num_workers + driving) / parallel
            + promoting / promotion.num_workers / max(1, min(work.trainings, parallel))
            + searching / max(1, min(work.search_phases, parallel)),
            price=None if price is None else price * paid_hours,
        )


@dataclass(frozen=True)
class SearchEstimate(SearchTime, SearchWork):
    """Counts, hours and bytes of a search.

    Attributes:
        parallel: Trials at a time.
        worker_bytes: Peak memory of a training worker.
        driver_bytes: Peak memory of a trial's own process.
        memory_free: Bytes of memory available on this machine; 0 where it does not matter.
        disk: Peak of the bytes in the storage.
        disk_parts: By what they are of, each at its own peak.
        disk_kept: Bytes there in the end.
        disk_free: Bytes that are free there.
        warnings: What does not fit, and what else a user should know.
        checkpoint_bytes: Of one training checkpoint of a trial; 0 where none trains.
        processes: All processes by parts.
        refusals: Which of them do not fit the GPU that they require.
    """

    parallel: int
    worker_bytes: int
    driver_bytes: int
    memory_free: int
    disk: int
    disk_parts: dict[str, int]
    disk_kept: int
    disk_free: int
    warnings: tuple[str, ...]
    checkpoint_bytes: int
    processes: tuple[Need, ...]
    refusals: tuple[str, ...]

    @classmethod
    def of(
        cls,
        inputs: SearchInputs,
        work: SearchWork,
        storage: Path,
        *,
        parallel: int,
        alone: bool,
        gpu_bytes: int | None = None,
        gpu: str | None = None,
        warnings: Sequence[str] = (),
    ) -> SearchEstimate:
        """Estimate a search.

        Args:
            inputs: Its configuration and checkpoint.
            work: How much it does.
            storage: The folder that it writes into.
            parallel: Trials at a time.
            alone: Whether this machine is the only one, against whose memory the search is checked.
            gpu_bytes: Memory of each GPU, against which processes with a GPU are checked.
            gpu: Type of the GPUs; by default the one that the configuration names.
            warnings: Further warnings.
        """
        train = inputs.config.train
        stored = Storage.of(inputs, work.converted, work.trainings, storage)
        needs = Needs(inputs, stored.mixed)
        worker = needs.trainings()[0].total
        driver = needs.planning().total
        processes = needs.all()
        total = parallel * (driver + train.num_workers * worker)
        memory = available_bytes() if alone and not train.gpus_per_worker else 0
        problems: list[str] = []
        if memory and total > SPARE * memory:
            problems.append(
                f"memory: {parallel} trial(s) at a time take about {gib(total)}, and {gib(memory)} "
                "are available; lower resources.max_concurrent, train.micro_batch_size or "
                "train.num_workers"
            )
        problems += [
            f"memory: {need.process} takes {gib(need.total)} of a GPU, and each has "
            f"{gib(gpu_bytes)}"
            for need in processes
            if gpu_bytes is not None
            and need.share
            and need.total > gpu_bytes * min(1.0, need.share)
        ]
        if shortage := stored.shortage(parallel):
            problems.append(f"disk: {shortage}")
        disk = stored.disk(parallel)
        return cls(
            **asdict(work),
            **asdict(SearchTime.of_work(inputs, needs, work, parallel, gpu)),
            parallel=parallel,
            worker_bytes=worker,
            driver_bytes=driver,
            memory_free=memory,
            disk=disk.most,
            disk_parts=disk.parts,
            disk_kept=disk.kept,
            disk_free=stored.free,
            warnings=(*problems, *warnings),
            checkpoint_bytes=stored.trial_checkpoint_bytes,
            processes=tuple(processes),
            refusals=tuple(needs.refusals()),
        )

    def check(self) -> None:
        """Raise ConfigError for processes that do not fit the GPU that they ask for."""
        if self.refusals:
            raise ConfigError("\n".join(self.refusals))

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self) | {"processes": [need.record() for need in self.processes]}

    def describe(self, config: SearchConfig, *, verbose: bool = False) -> Mapping[str, str]:
        """Return the estimate in words, by what they are about.

        Args:
            config: The configuration.
            verbose: Whether to list the memory of each process, by parts.
        """
        probes = f", {self.probes} of them probes" if self.probes else ""
        in_phases = ""
        if self.search_phases:
            tokens = compact(self.search_phase_tokens)
            in_phases = f"; {tokens} in {self.search_phases} search phase(s) of DHA before"
        words = {
            "trials": f"{self.trials}{probes}; {self.trainings} full training(s) in the promotion",
            "tokens": (
                f"about {compact(self.tokens)} to train on, {compact(self.tokens_most)} at most; "
                f"{compact(self.tokens_measured)} to measure on{in_phases}"
            ),
            "rate": f"{self.rate:.0f} tokens/s per worker, {self.rate_from}"
            if self.rate
            else self.rate_from,
        }
        if self.hours is not None and self.cpu_hours is not None:
            unit = (
                f"{self.gpu_hours:.2f} GPU-hours"
                if self.gpu_hours
                else f"{self.cpu_hours:.2f} CPU-hours"
            )
            wall = (
                f"about {duration(3600 * self.hours)} with {self.parallel} trial(s) at a time, "
                "starts left out"
            )
            words["time"] = f"{unit}; {wall}"
        if self.price is not None:
            words["price"] = f"{self.price:.2f} at {config.resources.price_per_hour:g} an hour"
        free = f" ({gib(self.memory_free)} available here)" if self.memory_free else ""
        total = self.parallel * (self.driver_bytes + config.train.num_workers * self.worker_bytes)
        largest = max(self.processes, key=lambda need: need.total)
        words["memory"] = (
            f"{gib(total)} with {self.parallel} trial(s) at a time{free}; the largest process, "
            f"{largest.process}, {largest.summary}"
        )
        if verbose:
            words |= {f"memory, {need.process}": need.describe() for need in self.processes}
        minutes = config.resources.checkpoint_minutes
        words |= describe_checkpoints(self.checkpoint_bytes, minutes)
        parts = ", ".join(
            f"{name} {gib(value)}" for name, value in self.disk_parts.items() if value
        )
        words["disk"] = (
            f"up to {gib(self.disk)} ({gib(self.disk_free)} free), {gib(self.disk_kept)} in the "
            f"end; at most {parts}"
        )
        return words
