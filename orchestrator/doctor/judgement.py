"""Interpret the measurements of `headfold doctor`: when a line is red, and its remedy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from attention.base.text import gib
from attention.base.timing import duration
from orchestrator.doctor.calls import ClusterNode, NoAnswerError
from orchestrator.doctor.findings import Finding
from orchestrator.doctor.probes import AttentionFacts, HubFacts, NodeFacts, StorageRates
from orchestrator.doctor.workers import ReduceFacts

CLOCK_WARNING = 0.5
CLOCK_LIMIT = 5.0
"""Seconds between the clocks of two nodes. Records of one search are written by several nodes; a
signed request to S3 is refused from 15 minutes on."""
DISK_LIMIT = 0.95
"""Used share of the disk of a node's scratch folder above which Ray creates no objects there."""
MEGA = 1e6
SLOW_STORAGE = 100 * MEGA
"""Bytes per second, below which checkpoints of large models are a problem."""
CHECKPOINT_SHARE = 0.1
CHECKPOINT_LIMIT = 0.5
"""Share of the time between two checkpoints that it takes to write one."""
SLOW_LINK = {"one host": 10e9, "several hosts": 2.5e9}
"""Bytes per second of NCCL's bus bandwidth, below which ZeRO 3 waits for its collectives."""
SILENT = "see the node's log (`ray logs`), and whether the node is overloaded or about to leave"


class ConfigFacts(NamedTuple):
    """Requirements of a configuration on storage and nodes.

    Attributes:
        weights_bytes: Of the model on the hub, 0 for a folder.
        checkpoint_bytes: Of one training checkpoint.
        checkpoint_minutes: Between two of them.
        shortage: Why the search does not fit its storage; None where it does.
        head_dim: Of the model.
    """

    weights_bytes: int
    checkpoint_bytes: int
    checkpoint_minutes: float
    shortage: str | None
    head_dim: int


def silent(check: str, answers: Mapping[str, object]) -> list[Finding]:
    """Return a red line for each node that did not answer, or could not."""
    findings = []
    for name, answer in answers.items():
        if isinstance(answer, NoAnswerError):
            findings.append(Finding(check, "failed", f"{name}: {answer}", SILENT))
        elif isinstance(answer, Exception):
            summary = f"{name}: {type(answer).__name__}: {answer}"
            findings.append(Finding(check, "failed", summary, SILENT))
    return findings


def judge_devices(
    nodes: Sequence[ClusterNode], facts: Mapping[str, NodeFacts], device: str | None
) -> list[Finding]:
    """Compare the GPUs that Ray counts with those that the driver shows.

    Args:
        nodes: Those that are up.
        facts: Of each, by name.
        device: What the configuration computes on; None without one.
    """
    findings = []
    drivers = defaultdict(list)
    for node in nodes:
        if node.name not in facts:
            continue
        gpus = facts[node.name]["gpus"]
        cpus = f"{node.resources.get('CPU', 0):g} CPU"
        kinds = ", ".join(
            f"{sum(gpu['name'] == name for gpu in gpus)} x {name}"
            for name in dict.fromkeys(gpu["name"] for gpu in gpus)
        )
        for gpu in gpus:
            drivers[gpu["driver"]].append(node.name)
        seen = f"{node.name}: {cpus}, Ray counts {node.gpus} GPU, the driver shows {len(gpus)}"
        seen += f" ({kinds}; driver {gpus[0]['driver']})" if gpus else ""
        status, remedy = "ok", ""
        if device != "cpu" and node.gpus > len(gpus):
            status = "failed"
            remedy = (
                "start the node with its GPUs: NVIDIA's driver on the host, its container toolkit "
                "(docker --gpus all), num-gpus as many as there are; or train.device=cpu for a "
                "rehearsal"
            )
        elif device != "cpu" and node.gpus < len(gpus):
            status, remedy = "warning", "Ray uses fewer GPUs than there are: raise --num-gpus"
        elif any(gpu["used_mib"] > 0.1 * gpu["memory_mib"] for gpu in gpus):
            status = "warning"
            remedy = "memory of GPUs is in use: see nvidia-smi for whose process that is"
        findings.append(Finding("devices", status, seen, remedy, {"gpus": len(gpus)}))
    if len(drivers) > 1:
        summary = "; ".join(f"{name}: {', '.join(set(where))}" for name, where in drivers.items())
        remedy = "install one driver on all nodes: NCCL across different ones is not supported well"
        findings.append(Finding("devices", "warning", f"drivers differ: {summary}", remedy))
    return findings


def judge_versions(facts: Mapping[str, NodeFacts]) -> list[Finding]:
    """Compare the versions of all nodes with those of the first, the driver's."""
    findings = []
    names = list(facts)
    for package in next(iter(facts.values()))["versions"] if facts else ():
        where = defaultdict(list)
        for name in names:
            where[facts[name]["versions"][package]].append(name)
        if len(where) > 1:
            summary = "; ".join(f"{version} on {', '.join(on)}" for version, on in where.items())
            remedy = (
                "start all nodes from one image or with one lock file "
                "(deploy/requirements.lock); a Ray job brings the code along (--working-dir .)"
            )
            findings.append(Finding("versions", "failed", f"{package} differs: {summary}", remedy))
    if findings or not facts:
        return findings
    versions = facts[names[0]]["versions"]
    same = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [Finding("versions", "ok", f"equal on {len(names)} node(s): {same}")]


def judge_clocks(offsets: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Judge by how much the clocks of nodes are off that of the driver.

    Args:
        offsets: Seconds, and by how many they may be wrong, by name of a node.
    """
    findings = []
    for name, (offset, error) in offsets.items():
        least = max(0.0, abs(offset) - error)
        if least > CLOCK_WARNING:
            status = "failed" if least > CLOCK_LIMIT else "warning"
            remedy = "run a time service on every node (chrony; the clouds have their own servers)"
            summary = f"{name}: {offset:+.1f} s from the driver's clock (within {error:.2f} s)"
            findings.append(Finding("clocks", status, summary, remedy, {"seconds": offset}))
    if findings:
        return findings
    largest = max((abs(offset) for offset, _ in offsets.values()), default=0.0)
    error = max((error for _, error in offsets.values()), default=0.0)
    summary = f"{len(offsets)} node(s) within {largest + error:.2f} s of the driver's clock"
    return [Finding("clocks", "ok", summary, numbers={"seconds": largest})]


def judge_disks(
    facts: Mapping[str, NodeFacts], free: int | None, config: ConfigFacts | None
) -> list[Finding]:
    """Judge the free space of each node's scratch folder and hub cache, and of the storage.

    Args:
        facts: Of each node, by name.
        free: Bytes at the storage; None at an address.
        config: What the search takes; None without one.
    """
    findings = []
    for name, node in facts.items():
        scratch, cache = node["disks"]["scratch"], node["disks"]["hub cache"]
        used = 1 - scratch["free"] / max(1, scratch["total"])
        if used > DISK_LIMIT:
            summary = f"{name}: {used:.0%} of the disk of {scratch['folder']} is used"
            remedy = "free it, or give the node a larger disk: Ray makes no objects beyond 95 %"
            findings.append(Finding("disk", "failed", summary, remedy))
        if config is not None and config.weights_bytes > cache["free"]:
            summary = (
                f"{name}: {gib(cache['free'])} free for the hub's cache ({cache['folder']}), and "
                f"the model has {gib(config.weights_bytes)}"
            )
            remedy = "set HF_HOME of the nodes to a folder with room, best one that all share"
            findings.append(Finding("disk", "failed", summary, remedy))
    if config is not None and config.shortage:
        remedy = "make room, or make the search smaller as it says"
        findings.append(Finding("disk", "failed", config.shortage, remedy))
    if findings or not facts:
        return findings
    least = min(node["disks"]["scratch"]["free"] for node in facts.values())
    summary = f"at least {gib(least)} free on every node"
    summary += "" if free is None else f", {gib(free)} at the storage"
    return [Finding("disk", "ok", summary, numbers={"scratch_bytes": least})]


def judge_visibility(
    folder: str, seen: Mapping[str, Sequence[str]], arrived: Sequence[str]
) -> list[Finding]:
    """Judge whether all nodes see one folder.

    Args:
        folder: The storage.
        seen: The marks that each node has seen there, by name of the node.
        arrived: Nodes whose own mark the driver has seen.
    """
    unreachable = [name for name in seen if "driver" not in seen[name] or name not in arrived]
    if not unreachable:
        return [Finding("shared-storage", "ok", f"{folder} is the same on {len(seen)} node(s)")]
    summary = f"{folder} on {', '.join(unreachable)} is another folder than the driver's"
    remedy = (
        "mount one file system there on every node (NFS, EFS, Filestore, a volume of "
        "Kubernetes), or name a folder that is shared"
    )
    return [Finding("shared-storage", "failed", summary, remedy)]


def judge_rates(rates: Mapping[str, StorageRates], config: ConfigFacts | None) -> list[Finding]:
    """Judge what all nodes together write and read, at the same time."""
    if not rates:
        return []
    write = sum(one["written"] / max(1e-9, one["write_seconds"]) for one in rates.values())
    read = sum(one["written"] / max(1e-9, one["read_seconds"]) for one in rates.values())
    numbers = {"write_bytes_per_second": write, "read_bytes_per_second": read}
    summary = f"{write / MEGA:.0f} MB/s written, {read / MEGA:.0f} MB/s read, {len(rates)} node(s)"
    remedy = (
        "use storage with more throughput (EFS: elastic or provisioned; Filestore: a higher tier; "
        "a parallel file system; an address such as s3://), or write fewer checkpoints "
        "(promotion.checkpoint_minutes)"
    )
    if config is None:
        slow = write < SLOW_STORAGE
        status = "warning" if slow else "ok"
        return [Finding("storage", status, summary, remedy if slow else "", numbers)]
    seconds = config.checkpoint_bytes / write
    share = seconds / (60 * config.checkpoint_minutes)
    summary += (
        f"; a training checkpoint of {gib(config.checkpoint_bytes)} takes {duration(seconds)}, "
        f"every {config.checkpoint_minutes:g} min"
    )
    status = "ok"
    if share > CHECKPOINT_SHARE:
        status = "failed" if share > CHECKPOINT_LIMIT else "warning"
    numbers["checkpoint_seconds"] = seconds
    return [Finding("storage", status, summary, "" if status == "ok" else remedy, numbers)]


def judge_hub(facts: Mapping[str, HubFacts], wanted: Sequence[str]) -> list[Finding]:
    """Judge whether every node gets from the hub what a configuration names.

    Args:
        facts: Of each node, by name.
        wanted: Names on the hub; none where nothing is needed from there.
    """
    findings = []
    problems = defaultdict(list)
    for name, hub in facts.items():
        for repository, why in hub["missing"].items():
            problems[repository, why].append(name)
    for (repository, why), where in problems.items():
        summary = f"{repository}: {why} (on {', '.join(where)})"
        findings.append(Finding("hub", "failed", summary, _hub_remedy(repository, why)))
    if findings or not facts:
        return findings
    tokens = sum(hub["token"] for hub in facts.values())
    offline = sum(not hub["reachable"] for hub in facts.values())
    summary = "reachable" if not offline else f"offline on {offline} of {len(facts)} node(s)"
    summary += f"; token on {tokens} of {len(facts)} node(s)"
    if wanted:
        summary += f"; {', '.join(wanted)}: can be read"
    else:
        summary += "; nothing is needed from it"
    return [Finding("hub", "ok", summary, numbers={"tokens": tokens})]


def _hub_remedy(repository: str, why: str) -> str:
    if why == "gated":
        return (
            f"accept the licence at https://huggingface.co/{repository} with the account that the "
            "token belongs to"
        )
    if "token" in why:
        return (
            "give every node a token (HF_TOKEN, or ~/.cache/huggingface/token as "
            "cluster.yaml mounts it), and accept the licence on the hub"
        )
    if "reached" in why:
        return (
            f"open the way to the hub (HF_HUB_OFFLINE unset, a proxy, HF_ENDPOINT), or fetch it "
            f"once into a folder that every node sees: hf download {repository}"
        )
    return "check the name"


def judge_attention(facts: Mapping[str, AttentionFacts], dtype: str) -> list[Finding]:
    """Judge which kernel of SDPA a training step takes on each node."""
    findings = []
    where = defaultdict(list)
    for name, one in facts.items():
        where[one["device"], one["kernel"]].append(name)
    for (device, kernel), names in where.items():
        time = max(facts[name]["milliseconds"] for name in names)
        summary = f"{device}: {kernel} in {dtype} ({', '.join(names)})"
        status, remedy = "ok", ""
        if kernel in ("math", "none") and device != "CPU":
            status = "failed"
            remedy = (
                "no fused kernel: memory and time grow with the square of the length; train in "
                "bfloat16 on GPUs of compute capability 8.0 or newer, with a torch built for them"
            )
        elif kernel == "memory-efficient":
            status, remedy = "warning", "flash attention takes train.dtype=bfloat16, and head "
            remedy += "widths up to 256"
        findings.append(Finding("attention", status, summary, remedy, {"milliseconds": time}))
    return findings


def judge_reduce(facts: ReduceFacts) -> list[Finding]:
    """Judge the bus bandwidth of an all-reduce: 2 (n - 1) / n of the bytes per second."""
    workers = facts["workers"]
    hosts = "one host" if facts["hosts"] == 1 else "several hosts"
    backend = f"{facts['backend']} {facts['version']}".strip()
    if workers == 1:
        return [Finding("all-reduce", "ok", f"{backend}: one worker, nothing to reduce")]
    bandwidth = 2 * (workers - 1) / workers * facts["bytes"] / facts["seconds"]
    summary = (
        f"{backend}: {bandwidth / 1e9:.2f} GB/s of bus bandwidth, {workers} workers on "
        f"{facts['hosts']} host(s), {facts['bytes'] / 2**20:.0f} MiB"
    )
    numbers = {"bytes_per_second": bandwidth, "workers": workers, "hosts": facts["hosts"]}
    if facts["backend"] == "nccl" and bandwidth < SLOW_LINK[hosts]:
        remedy = (
            "ZeRO 3 will wait for its collectives: keep a trial's workers on one node "
            "(resources.placement_strategy=STRICT_PACK), use nodes with NVLink, EFA or InfiniBand; "
            "NCCL_DEBUG=INFO says what NCCL uses"
        )
        return [Finding("all-reduce", "warning", summary, remedy, numbers)]
    return [Finding("all-reduce", "ok", summary, numbers=numbers)]
