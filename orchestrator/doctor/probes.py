"""Facts and measurements that `headfold doctor` collects on a node; they are judged elsewhere."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from attention.base.messages import reason
from orchestrator.storage.mirror import is_remote, open_address

if TYPE_CHECKING:
    from transformers import LlamaConfig

_PACKAGES = ("torch", "transformers", "ray", "deepspeed", "datasets", "mlflow", "numpy")
_OWN_PACKAGES = ("headfold", "attention", "search_spaces", "trainers", "orchestrator")
_CHECKOUT = Path(__file__).resolve().parents[2]
_BLOCK = 4 * 2**20
_SMI_FIELDS = "name,driver_version,memory.total,memory.used"
_HUB_SECONDS = 10.0


class GPUFacts(TypedDict):
    """A GPU as the driver shows it."""

    name: str
    driver: str
    memory_mib: float
    used_mib: float


class DiskFacts(TypedDict):
    """A disk, by a folder on it."""

    folder: str
    free: int
    total: int


class NodeFacts(TypedDict):
    """Facts of one node."""

    versions: dict[str, str]
    gpus: list[GPUFacts]
    disks: dict[str, DiskFacts]
    """Disks of the scratch folder ("scratch") and of the cache of the hub ("hub cache")."""


def node_facts() -> NodeFacts:
    """Return versions, GPUs and disks of this node; no library that takes long is imported."""
    versions = {"Python": platform.python_version(), "Headfold's code": _code_digest()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    disks = {"scratch": _disk(Path(tempfile.gettempdir())), "hub cache": _disk(_hub_cache())}
    return {"versions": versions, "gpus": _gpus(), "disks": disks}


def _code_digest() -> str:
    digest = hashlib.sha256()
    for package in _OWN_PACKAGES:
        for file in sorted((_CHECKOUT / package).rglob("*.py")):
            digest.update(file.relative_to(_CHECKOUT).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _gpus() -> list[GPUFacts]:
    """Return the GPUs of the machine, even those hidden from this process."""
    if (command := shutil.which("nvidia-smi")) is None:
        return []
    words = [command, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus: list[GPUFacts] = []
    for line in done.stdout.splitlines():
        name, driver, total, used = (word.strip() for word in line.split(","))
        gpus.append(
            {"name": name, "driver": driver, "memory_mib": _mib(total), "used_mib": _mib(used)}
        )
    return gpus


def _mib(text: str) -> float:
    return float(text) if text.replace(".", "").isdigit() else 0.0  # of some cards "[N/A]"


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _disk(folder: Path) -> DiskFacts:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    usage = shutil.disk_usage(existing)
    return {"folder": str(folder), "free": usage.free, "total": usage.total}


class Clock:
    """An actor that returns the time of its node.

    It is defined here and not where it is used: a sick node may be unable to import the libraries
    of other modules.
    """

    def now(self) -> float:
        """Return the clock of this node, in seconds since 1970."""
        return time.time()


# ---- storage -------------------------------------------------------------------------------------


def leave_mark(folder: str, name: str) -> list[str]:
    """Leave a mark in a folder, and return the marks that are there; none without the folder."""
    try:
        Path(folder, f"mark-{name}").write_text(name, encoding="utf-8")
    except FileNotFoundError:
        return []
    return marks(folder)


def leave_mark_of_node(folder: str) -> list[str]:
    """Do the same with the name of this node in Ray."""
    import ray

    return leave_mark(folder, ray.get_runtime_context().get_node_id())


def marks(folder: str) -> list[str]:
    """Return the marks in a folder."""
    return sorted(file.name.removeprefix("mark-") for file in Path(folder).glob("mark-*"))


class StorageRates(TypedDict):
    """Seconds that a node took to write and to read back so many bytes."""

    written: int
    write_seconds: float
    read_seconds: float


def storage_rates(location: str, size: int) -> StorageRates:
    """Write a file and read it back, as training checkpoints are, then remove it.

    The file is on the disk, or at the address, before the time to write it ends, and out of this
    node's memory before it is read.

    Args:
        location: A folder that exists, or an address.
        size: Bytes.
    """
    name = f"rate-{uuid.uuid4().hex}"
    block = os.urandom(_BLOCK)  # what can be compressed, a file system might
    sizes = [min(_BLOCK, size - start) for start in range(0, size, _BLOCK)]
    if is_remote(location):
        return _address_rates(location, name, block, sizes)
    file = Path(location, name)
    try:
        started = time.perf_counter()
        with file.open("wb") as stream:
            for count in sizes:
                stream.write(block[:count])
            stream.flush()
            os.fsync(stream.fileno())
            written = time.perf_counter()
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read_from = time.perf_counter()
        with file.open("rb") as stream:
            while stream.read(_BLOCK):
                pass
        ended = time.perf_counter()
    finally:
        file.unlink(missing_ok=True)
    return {
        "written": size,
        "write_seconds": written - started,
        "read_seconds": ended - read_from,
    }


def _address_rates(address: str, name: str, block: bytes, sizes: Sequence[int]) -> StorageRates:
    filesystem, root = open_address(address)
    path = f"{root.rstrip('/')}/.headfold-doctor-{name}"
    started = time.perf_counter()
    try:
        with filesystem.open_output_stream(path) as stream:
            for count in sizes:
                stream.write(block[:count])
        written = time.perf_counter()
        with filesystem.open_input_stream(path) as stream:
            while stream.read(_BLOCK):
                pass
        ended = time.perf_counter()
    finally:
        with contextlib.suppress(OSError):
            filesystem.delete_file(path)
    return {
        "written": sum(sizes),
        "write_seconds": written - started,
        "read_seconds": ended - written,
    }


# ---- hub -----------------------------------------------------------------------------------------


class HubFacts(TypedDict):
    """The hub as a node sees it.

    The token itself is never part of it.
    """

    token: bool
    offline: bool
    """Whether HF_HUB_OFFLINE is set."""
    reachable: bool
    missing: dict[str, str]
    """Why what a configuration needs cannot be had, by its name on the hub."""
    cached: list[str]
    """The files of it that this node has cached."""


def hub_facts(models: Sequence[str], datasets: Sequence[str]) -> HubFacts:
    """Return whether this node reaches the hub, and may read what a configuration names."""
    from huggingface_hub import constants, get_token

    offline = bool(constants.HF_HUB_OFFLINE)
    reachable = not offline and _reachable(constants.ENDPOINT)
    facts: HubFacts = {
        "token": get_token() is not None,
        "offline": offline,
        "reachable": reachable,
        "missing": {},
        "cached": [],
    }
    for kind, names in (("model", models), ("dataset", datasets)):
        for name in names:
            if _cached(name, kind):
                facts["cached"].append(name)
            elif why := _refusal(name, kind, reachable):
                facts["missing"][name] = why
    return facts


def _reachable(endpoint: str) -> bool:
    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=_HUB_SECONDS):
            return True
    except HTTPError:
        return True  # it has answered
    except OSError:
        return False


def _cached(name: str, kind: str) -> bool:
    """Return whether this node has weights of a model, or any file of a data set."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    snapshots = Path(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind), "snapshots")
    pattern = "*/**/*.safetensors" if kind == "model" else "*/**/*"
    return any(file.is_file() for file in snapshots.glob(pattern))


def _refusal(name: str, kind: str, reachable: bool) -> str | None:
    """Return why the hub does not give something; None where it does."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if not reachable:
        return "the hub cannot be reached, and this node has no copy"
    try:
        HfApi().auth_check(name, repo_type=kind)
    except GatedRepoError:
        return "gated" if get_token() else "gated, and this node has no token"
    except RepositoryNotFoundError:
        private = "" if get_token() else ", or private, and this node has no token"
        return f"not on the hub{private}"
    except Exception as error:  # of the hub, its HTTP client and the network: of a dozen types
        token = get_token()
        return reason(error, lambda text: text.replace(token, "***") if token else text)
    return None


# ---- attention -----------------------------------------------------------------------------------

KERNELS = {
    "_scaled_dot_product_flash_attention_for_cpu": "flash (CPU)",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
    "_scaled_dot_product_attention_math": "math",
}
"""Names of the kernels of SDPA, by torch's operators of them."""


class AttentionFacts(TypedDict):
    """The attention of a training step on a device."""

    device: str
    kernel: str
    milliseconds: float
    """Time of forward and backward of one layer."""


def attention_facts(device: str, dtype: str, head_dim: int, length: int) -> AttentionFacts:
    """Run forward and backward of one converted layer, and return the kernel that SDPA has used.

    Args:
        device: cpu or cuda.
        dtype: That of the training.
        head_dim: Of the model.
        length: Tokens of its sequence.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from attention.conversion.convert import build
    from attention.io.precision import DTYPES
    from attention.plan import AttentionPlan, LayerPlan

    plan = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 1, 0)),), head_dim=head_dim)
    config = small_llama(4, head_dim, 1, length)
    model: Any = build(config, plan, DTYPES[dtype]).train()
    model.to(device)
    tokens = torch.zeros(1, length, dtype=torch.long, device=device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()

    step()
    started = time.perf_counter()
    step()
    seconds = time.perf_counter() - started
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    operators = {event.name.removeprefix("aten::") for event in profiler.events() or ()}
    kernel = next((name for operator, name in KERNELS.items() if operator in operators), "none")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    return {"device": name, "kernel": kernel, "milliseconds": 1e3 * seconds}


def small_llama(heads: int, head_dim: int, layers: int, positions: int) -> LlamaConfig:
    """Return the config of a small Llama with heads of this width."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=512,
        hidden_size=heads * head_dim,
        intermediate_size=2 * heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


# ---- MLflow --------------------------------------------------------------------------------------


def log_to_store(uri: str | None, storage: str) -> float:
    """Log a run to a store, read it back and delete it; return the seconds that it took.

    Args:
        uri: Address of the store; None for a sqlite store in `storage`.
        storage: Folder.

    Raises:
        TrackingError: If the store cannot be used.
    """
    from orchestrator.tracking.runs import Tracker

    started = time.perf_counter()
    tracker = Tracker.open(uri, "headfold-doctor", storage)
    run_id = tracker.start("doctor")
    try:
        tracker.log_point(run_id, {"step": 1, "eval_loss": 2.5})
        if uri is not None:  # a file of a run that is deleted stays in a folder
            tracker.log_text(run_id, "written by headfold doctor", "doctor.txt")
        metrics = tracker.client.get_run(run_id).data.metrics
        if metrics != {"eval_loss": 2.5}:
            raise RuntimeError(f"logged a loss of 2.5, and the store returned {metrics}")
    finally:
        tracker.client.delete_run(run_id)
    return time.perf_counter() - started
