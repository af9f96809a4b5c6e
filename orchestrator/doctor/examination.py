"""The checks of `headfold doctor`, one after the other; none takes longer than it may.

Operations that can hang (a collective, a store, a mounted folder) run in a separate process, which
is ended when its time is over. A failing check does not affect the others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from attention.base.messages import reason
from attention.base.progress import stage
from attention.io.sources import is_folder
from orchestrator.cluster.capacity import (
    Nodes,
    cluster_nodes,
    resolve_strategy,
    search_concurrency,
    total,
)
from orchestrator.cluster.pending_resources import describe_pending
from orchestrator.cluster.placement import Demand, ProcessResources
from orchestrator.config.schema import ConfigError, SearchConfig
from orchestrator.doctor import judgement, probes, workers
from orchestrator.doctor.calls import (
    ClusterNode,
    NoAnswerError,
    alive_nodes,
    call,
    call_on_nodes,
)
from orchestrator.doctor.findings import CHECK_NAMES, Finding
from orchestrator.doctor.judgement import ConfigFacts, silent
from orchestrator.doctor.probes import NodeFacts
from orchestrator.resources.disk import checkpoint_bytes
from orchestrator.search.estimate import storage_of
from orchestrator.search.setup import SearchSetup, open_models
from orchestrator.search.validation import check_accelerators
from orchestrator.storage.mirror import is_remote
from orchestrator.storage.paths import check_writable, disk_free, storage_path
from orchestrator.tracking.errors import redact
from orchestrator.tracking.runs import default_uri
from trainers.settings import Shape, TrainSettings
from trainers.text.corpora import resolve

_PINGS = 5
_PING_SECONDS = 10.0
_HEAD_DIM = 128
_LENGTH = {"cuda": 2048, "cpu": 256}
"""Tokens of the sequence on which attention is tried, by device."""
_LOCAL_STORE = "doctor-mlflow"


@dataclass
class Examination:
    """An examination of the cluster that this process is connected to.

    Attributes:
        config: What is to run here; None to try what there is.
        storage: The `storage` setting that is tried.
        seconds: How long one check may take.
        probe_bytes: Size of the file by which storage is measured.
        nodes: Those that are up.
        facts: Of each node, by its name.
        needs: What the configuration takes; None without one, or where it cannot be read.
        folder: Below the storage, for what is written; None where that failed.
        shared: Whether every node sees it.
        room: Whether the workers have room.
    """

    config: SearchConfig | None
    storage: str
    seconds: float
    probe_bytes: int
    nodes: list[ClusterNode] = field(default_factory=list)
    facts: dict[str, NodeFacts] = field(default_factory=dict)
    needs: ConfigFacts | None = None
    folder: Path | None = None
    shared: bool = False
    room: bool = True
    _made: list[Path] = field(default_factory=list)

    def run(self, only: Sequence[str] = ()) -> Iterator[Finding]:
        """Make the checks, or some of them, and yield what they come to as it comes.

        The requirements of a check (the nodes, a folder) are established in any case, and yield
        where that fails.
        """
        names = [name for name in ALL_CHECKS if not only or name in only]
        try:
            with stage("doctor", total=len(names), unit="checks") as progress:
                for name, check in ALL_CHECKS.items():
                    if name not in names and name not in NEEDED:
                        continue
                    progress.to(progress.done, name)
                    findings = self._checked(name, check)
                    if name in names:
                        yield from findings
                        progress.step()
                    else:
                        yield from (one for one in findings if one.status == "failed")
        finally:
            self._clean()

    def _checked(self, name: str, check: Callable[[Examination], list[Finding]]) -> list[Finding]:
        """Return what a check comes to, also where it raises or never ends."""
        result: list[list[Finding]] = []

        def work() -> None:
            try:
                result.append(check(self))
            except NoAnswerError as error:
                result.append(
                    [Finding(name, "failed", str(error), TOO_SLOW.get(name, judgement.SILENT))]
                )
            except Exception as error:
                summary = reason(error, redact)
                if not isinstance(error, ValueError):  # our own errors contain the remedy
                    summary = f"{type(error).__name__}: {summary}"
                result.append(
                    [Finding(name, "failed", summary, REMEDIES.get(name, judgement.SILENT))]
                )

        # The file system of the storage, or Ray itself, may never answer this process either
        thread = threading.Thread(target=work, name=f"doctor-{name}", daemon=True)
        thread.start()
        thread.join(1.5 * self.seconds + 5)
        if not result:
            summary = f"no answer within {1.5 * self.seconds + 5:g} s"
            return [Finding(name, "failed", summary, TOO_SLOW.get(name, judgement.SILENT))]
        return result[0]

    def _clean(self) -> None:
        """Remove what was written."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        for parent in self._made:
            with contextlib.suppress(OSError):
                parent.rmdir()

    @property
    def device(self) -> str:
        """The device of the workers."""
        if self.config is not None:
            return self.config.train.shape.device
        return "cuda" if any(facts["gpus"] for facts in self.facts.values()) else "cpu"

    @property
    def shape(self) -> Shape:
        """The workers that are tried: those of a trial, else one for each GPU, or for each node."""
        if self.config is not None:
            return Demand.of(self.config).shape
        nodes = [Nodes(1, node.resources) for node in self.nodes]
        gpus, cpus = int(total(nodes, "GPU")), int(total(nodes, "CPU"))
        if self.device == "cuda" and gpus:
            return Shape(gpus, 1.0, 1.0, strategy="PACK", device="cuda")
        few = max(1, min(cpus, max(2, len(self.nodes))))
        return Shape(few, 1.0 if cpus else 0.5, 0.0, strategy="SPREAD")

    @property
    def settings(self) -> TrainSettings:
        """The training settings of the trials."""
        if self.config is not None:
            return self.config.train
        return TrainSettings(zero_stage=3, dtype="bfloat16")

    # ---- the checks, in their order ----------------------------------------------------------

    def check_config(self) -> list[Finding]:
        """Read the configuration against its model, and what it takes."""
        self.nodes = alive_nodes()
        if self.config is None:
            return [Finding("config", "skipped", "none was given (--config FILE)")]
        findings = []
        parallel = 0
        try:
            parallel = search_concurrency(self.config, cluster_nodes())
        except ConfigError as error:
            self.room = False
            findings.append(Finding("config", "failed", str(error), REMEDIES["config"]))
        try:
            self.needs = _needs(self.config, max(1, parallel))
        except ConfigError as error:
            findings.append(Finding("config", "failed", str(error), REMEDIES["config"]))
        summary = f"{self.config.name}: room for {parallel} trial(s) at a time"
        status = "ok" if parallel else "skipped"
        return [*findings, Finding("config", status, summary, numbers={"trials": parallel})]

    def check_nodes(self) -> list[Finding]:
        """Wait for the nodes that the workers need, and look at each."""
        findings = []
        if self.config is not None and self.room:
            shape = resolve_strategy(self.shape, cluster_nodes())
            bundles = [ProcessResources.of_worker(shape).bundle] * shape.workers
            group = placement_group(bundles, strategy=shape.strategy)
            try:
                self.room = bool(group.wait(self.seconds))
            finally:
                waits_for = "" if self.room else describe_pending(Demand.of(self.config))
                remove_placement_group(group)
            if not self.room:
                summary = f"no room for the workers within {self.seconds:g} s"
                summary += f": waits for {waits_for}" if waits_for else ""
                findings.append(Finding("nodes", "failed", summary, REMEDIES["nodes"]))
        self.nodes = alive_nodes()
        answers = call_on_nodes(probes.node_facts, nodes=self.nodes, seconds=self.seconds)
        self.facts = {name: a for name, a in answers.items() if not isinstance(a, Exception)}
        findings += silent("nodes", answers)
        cpus = sum(node.resources.get("CPU", 0.0) for node in self.nodes)
        gpus = sum(node.gpus for node in self.nodes)
        summary = f"{len(self.nodes)} node(s) up, with {cpus:g} CPU and {gpus} GPU"
        numbers = {"nodes": len(self.nodes), "cpus": cpus, "gpus": gpus}
        return [*findings, Finding("nodes", "ok", summary, numbers=numbers)]

    def check_devices(self) -> list[Finding]:
        """Compare the GPUs that Ray counts with those that the driver shows."""
        device = None if self.config is None else self.config.train.shape.device
        return judgement.judge_devices(self.nodes, self.facts, device)

    def check_versions(self) -> list[Finding]:
        """Compare versions over the nodes."""
        return judgement.judge_versions(self.facts)

    def check_clocks(self) -> list[Finding]:
        """Compare the clocks of the nodes with that of this process."""
        offsets: dict[str, tuple[float, float]] = {}
        clock: Any = ray.remote(num_cpus=0)(probes.Clock)
        actors = [
            (node, clock.options(scheduling_strategy=node.strategy).remote()) for node in self.nodes
        ]
        # All start at the same time, so that one that hangs leaves no other without time
        first = [actor.now.remote() for _, actor in actors]
        ray.wait(first, num_returns=len(first), timeout=self.seconds)
        findings = []
        for (node, actor), answer in zip(actors, first, strict=True):
            try:
                ray.get(answer, timeout=0)
                offsets[node.name] = _offset(actor)
            except Exception as error:
                summary = NoAnswerError(f"no clock within {self.seconds:g} s: {reason(error)}")
                findings += silent("clocks", {node.name: summary})
            finally:
                ray.kill(actor)
        return [*findings, *judgement.judge_clocks(offsets)]

    def check_shared_storage(self) -> list[Finding]:
        """Write into the storage, and see whether every node does so in the same folder."""
        if is_remote(self.storage):
            from orchestrator.storage.mirror import open_address

            open_address(self.storage)
        base = storage_path(self.storage)
        check_writable(base)
        missing = [path for path in (base, *base.parents) if not path.exists()]
        folder = base / f".headfold-doctor-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        self._made = missing
        self.folder = folder
        probes.leave_mark(str(folder), "driver")
        answers = call_on_nodes(
            probes.leave_mark_of_node, str(folder), nodes=self.nodes, seconds=self.seconds
        )
        there = probes.marks(str(folder))
        arrived = [node.name for node in self.nodes if node.identity in there]
        seen = {name: a for name, a in answers.items() if not isinstance(a, Exception)}
        findings = silent("shared-storage", answers)
        findings += judgement.judge_visibility(str(base), seen, arrived)
        self.shared = all(one.status == "ok" for one in findings)
        return findings

    def check_storage(self) -> list[Finding]:
        """Measure what all nodes together write and read."""
        location = self.storage
        if not is_remote(location):
            if self.folder is None or not self.shared:
                return [Finding("storage", "skipped", "the storage is not the same on all nodes")]
            location = str(self.folder)
        answers = call_on_nodes(
            probes.storage_rates,
            location,
            self.probe_bytes,
            nodes=self.nodes,
            seconds=self.seconds,
        )
        rates = {name: a for name, a in answers.items() if not isinstance(a, Exception)}
        return [*silent("storage", answers), *judgement.judge_rates(rates, self.needs)]

    def check_disk(self) -> list[Finding]:
        """Judge the free space."""
        free = None if is_remote(self.storage) else disk_free(storage_path(self.storage))
        return judgement.judge_disks(self.facts, free, self.needs)

    def check_hub(self) -> list[Finding]:
        """See whether each node gets what the configuration names from the hub."""
        models, datasets = _hub_names(self.config)
        answers = call_on_nodes(
            probes.hub_facts, models, datasets, nodes=self.nodes, seconds=self.seconds
        )
        facts = {name: a for name, a in answers.items() if not isinstance(a, Exception)}
        return [*silent("hub", answers), *judgement.judge_hub(facts, [*models, *datasets])]

    def check_mlflow(self) -> list[Finding]:
        """Log a run to the store of the configuration, and delete it."""
        uri = self.config.tracking.uri if self.config is not None else None
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
        base = storage_path(self.storage)
        if uri is None and not (base / "mlflow.db").is_file():
            if self.folder is None:
                return [Finding("mlflow", "skipped", "its store would be in the storage")]
            base = self.folder / _LOCAL_STORE
            base.mkdir()
        # In this process, as the driver of a search does it, which alone may have the credentials
        took = probes.log_to_store(uri, str(base))
        where = redact(uri or default_uri(storage_path(self.storage)))
        summary = f"a run was logged in {took:.1f} s, to {where}"
        return [Finding("mlflow", "ok", summary, numbers={"seconds": took})]

    def check_attention(self) -> list[Finding]:
        """See which kernel of SDPA a training step takes on each node that would train."""
        device = self.device
        nodes = [node for node in self.nodes if node.gpus] if device == "cuda" else self.nodes
        dtype = self.settings.dtype
        width = self.needs.head_dim if self.needs is not None else _HEAD_DIM
        answers = call_on_nodes(
            probes.attention_facts,
            device,
            dtype,
            width,
            _LENGTH[device],
            nodes=nodes,
            seconds=self.seconds,
            gpus=1.0 if device == "cuda" else 0.0,
        )
        facts = {name: a for name, a in answers.items() if not isinstance(a, Exception)}
        failures = [
            Finding("attention", "failed", one.result, REMEDIES["attention"])
            for one in silent("attention", answers)
        ]
        return [*failures, *judgement.judge_attention(facts, dtype)]

    def check_reduce(self) -> list[Finding]:
        """Measure an all-reduce over the workers."""
        if not self.room:
            return [Finding("all-reduce", "skipped", "the workers have no room")]
        scratch = str(self.folder or Path(tempfile.gettempdir()))
        name = f"headfold-doctor-reduce-{uuid.uuid4().hex[:8]}"
        facts = call(
            workers.all_reduce,
            self.shape,
            name,
            scratch,
            self.seconds,
            node=self.nodes[0],
            seconds=self.seconds,
        )
        shutil.rmtree(Path(scratch, name), ignore_errors=True)
        return judgement.judge_reduce(facts)

    def check_training(self) -> list[Finding]:
        """Take one step with ZeRO 3, as a trial does."""
        if not self.room:
            return [Finding("training", "skipped", "the workers have no room")]
        if self.folder is None or not self.shared:
            return [Finding("training", "skipped", "the workers would not see the model")]
        folder = self.folder / "training"
        folder.mkdir()
        facts = call(
            workers.training_step,
            self.shape,
            self.settings,
            str(folder),
            self.seconds,
            node=self.nodes[0],
            seconds=self.seconds,
        )
        summary = (
            f"one ZeRO 3 step in {self.settings.dtype}, {self.shape.workers} worker(s): loss "
            f"{facts['loss']:.2f}, {facts['seconds']:.1f} s and {facts['start_seconds']:.1f} s to "
            "start and end"
        )
        numbers = {"seconds": facts["seconds"], "start_seconds": facts["start_seconds"]}
        return [Finding("training", "ok", summary, numbers=numbers)]


ALL_CHECKS: dict[str, Callable[[Examination], list[Finding]]] = dict(
    zip(
        CHECK_NAMES,
        (
            Examination.check_config,
            Examination.check_nodes,
            Examination.check_devices,
            Examination.check_versions,
            Examination.check_clocks,
            Examination.check_shared_storage,
            Examination.check_storage,
            Examination.check_disk,
            Examination.check_hub,
            Examination.check_mlflow,
            Examination.check_attention,
            Examination.check_reduce,
            Examination.check_training,
        ),
        strict=True,
    )
)
NEEDED = ("config", "nodes", "shared-storage")
"""Checks that others rest on."""

REMEDIES = {
    "config": "change the configuration or the cluster as it says",
    "nodes": (
        "see `ray status`: quotas and spot capacity of the cloud, or others who use the nodes; "
        "--seconds waits longer"
    ),
    "shared-storage": "name a folder, or an address, that can be written (storage, --storage)",
    "hub": "check the names of model and texts",
    "mlflow": (
        "start the server that tracking.uri (or MLFLOW_TRACKING_URI) names, on an address that the "
        "driver's node reaches; or leave it out"
    ),
    "attention": (
        "the training step fails on this node's device: check that torch is built for its GPU and "
        "driver (python -m torch.utils.collect_env)"
    ),
    "all-reduce": (
        "open all ports between the nodes, name the network (NCCL_SOCKET_IFNAME), and see what "
        "NCCL_DEBUG=INFO says"
    ),
    "training": "run it alone with `headfold doctor --only training`; the workers' logs say more",
}
"""Remedies where a check raises."""
TOO_SLOW = {
    "shared-storage": "the mount hangs: check the file server, and its security group",
    "storage": "the mount hangs or is very slow: check the file server's throughput",
    "mlflow": REMEDIES["mlflow"],
    "attention": "its GPUs are taken, or its driver hangs: see `ray status` and nvidia-smi",
    "all-reduce": f"a collective hangs: {REMEDIES['all-reduce']}",
    "training": "it hangs where the all-reduce did not: see the workers' logs; --seconds waits",
}
"""Remedies where a check does not end."""


def _offset(actor: Any) -> tuple[float, float]:
    """Return by how many seconds an actor's clock is ahead, and by how many that may be wrong."""
    best: tuple[float, float] | None = None
    for _ in range(_PINGS):
        before = time.time()
        there: float = ray.get(actor.now.remote(), timeout=_PING_SECONDS)
        after = time.time()
        error = (after - before) / 2
        if best is None or error < best[1]:
            best = (there - (before + after) / 2, error)
    assert best is not None
    return best


def _needs(config: SearchConfig, parallel: int) -> ConfigFacts:
    """Return what a search takes, from the config of its model."""
    setup = SearchSetup.open(open_models(config, weights=False), weights=False)
    check_accelerators(setup)
    size = setup.inputs.size
    section = config.promotion
    train = config.promotion_train if section.enabled and section.steps else config.train
    on_hub = not _is_local(config.model.path)
    return ConfigFacts(
        weights_bytes=size.total * setup.inputs.written.itemsize if on_hub else 0,
        checkpoint_bytes=checkpoint_bytes(setup.inputs.model, size, train),
        checkpoint_minutes=section.checkpoint_minutes or config.resources.checkpoint_minutes,
        shortage=None if is_remote(config.storage) else storage_of(setup).shortage(parallel),
        head_dim=setup.geometry.head_dim,
    )


def _is_local(model: str) -> bool:
    if Path(model).expanduser().exists():
        return True
    try:
        return is_folder(model)
    except ValueError:  # neither here nor on the hub: the configuration's check says it
        return True


def _hub_names(config: SearchConfig | None) -> tuple[list[str], list[str]]:
    """Return the models and data sets of the hub that a configuration names."""
    if config is None:
        return [], []
    named = (config.model.path, config.model.teacher)
    models = [model for model in named if model is not None and not _is_local(model)]
    data = config.data
    sections = (data.train, data.eval, data.calibration, data.test, config.promotion.data)
    sources = {data.source, *(section.source for section in sections if section is not None)}
    datasets = []
    for source in sorted(filter(None, sources)):
        with contextlib.suppress(ValueError):
            corpus = resolve(source)
            if corpus.kind == "hub":
                datasets.append(corpus.name)
    return models, list(dict.fromkeys(datasets))
