"""Fixtures that every test folder shares: the demo checkpoint, and tiny random models of each family."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a hub name must fail at once, not after half a minute of retries
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# For every Ray of the process, since the settings of its first Ray apply to later ones: a driver that still requires
# tokens takes no call of a cluster without them, and the cluster ends the driver's actors.
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ.pop("MLFLOW_TRACKING_URI", None)  # no test writes into the user's store

import emulated_device
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
)
from xdist.scheduler import LoadFileScheduling

from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan
from trainers.jobs.train_job import TrainJob
from trainers.settings import TrainSettings
from trainers.text.data import write_sequences

if TYPE_CHECKING:
    from orchestrator.tracking.runs import Tracker

# A shell's background job ignores Ctrl-C, and so would every process that the tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

emulated_device.reserve()

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent
DEMO = REPOSITORY / "examples" / "stdlib-llama"
BEGINNING = 2047  # the last token of its vocabulary, with which the texts of `chat_tokenizer` begin

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 4.0],
}


def _gemma4(num_hidden_layers: int, **settings: Any) -> Gemma4TextConfig:
    """So many layers with a window, which are converted, and after each of them one with full attention."""
    kinds = ["sliding_attention", "full_attention"] * num_hidden_layers
    own = {"layer_types": kinds, "vocab_size_per_layer_input": settings["vocab_size"]} | settings
    return Gemma4TextConfig(**own, num_hidden_layers=2 * num_hidden_layers)


# Config class, and what differs from TINY_SETTINGS; None drops a setting that the family does not have.
TINY: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma": (GemmaConfig, {"hidden_size": 24}),  # so that the head dim is not the width over the heads
    "gemma2": (
        Gemma2Config,
        {"hidden_size": 24, "sliding_window": 10, "query_pre_attn_scalar": 4}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3_text": (
        Gemma3TextConfig,
        {"hidden_size": 24, "sliding_window": 10, "query_pre_attn_scalar": 4, "final_logit_softcapping": 5.0}
        | {"sliding_window_pattern": 2},
    ),
    "gemma4_text": (
        _gemma4,
        {"hidden_size": 24, "sliding_window": 10, "final_logit_softcapping": 5.0, "global_head_dim": 16}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
        | {"hidden_size_per_layer_input": 6},
    ),
    "gpt_oss": (
        GptOssConfig,
        {"sliding_window": 10, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "granite": (
        GraniteConfig,
        {"attention_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.7},
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        {"attention_bias": True, "use_qk_norm": True, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "num_mtp_layers": 0},
    ),
    "gpt2": (
        GPT2Config,
        {"num_key_value_heads": None, "head_dim": None, "intermediate_size": None, "n_inner": 48}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "gpt_neox": (GPTNeoXConfig, {"num_key_value_heads": None, "head_dim": None, "rotary_pct": 0.5}),
    "llama": (LlamaConfig, {}),
    "minimax_m2": (
        MiniMaxM2Config,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "olmo2": (Olmo2Config, {}),
    "olmoe": (OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "opt": (
        OPTConfig,
        {"num_key_value_heads": None, "head_dim": None, "intermediate_size": None, "ffn_dim": 48, "dropout": 0.0},
    ),
    "phi": (PhiConfig, {"head_dim": None}),
    "phi3": (
        Phi3Config,
        {"head_dim": None, "original_max_position_embeddings": 40, "rope_parameters": LONGROPE},
    ),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "smollm3": (SmolLM3Config, {"no_rope_layer_interval": 2}),
    "stablelm": (StableLmConfig, {"head_dim": None, "use_qkv_bias": True, "qk_layernorm": True}),
}
# Token ids and Mistral's window are off by None; other settings are dropped by it.
NONE_IS_A_VALUE = ("bos_token_id", "eos_token_id", "pad_token_id", "sliding_window")
TINY_SETTINGS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


OUTSIDE = (
    *("subprocess", "multiprocessing", "torch.multiprocessing", "ray", "mlflow", "moto", "playwright"),
    *("deepspeed", "trainers.engine", "trainers.jobs", "attention.conversion.refinement"),
    *("orchestrator.evaluation", "orchestrator.serving", "orchestrator.tracking.runs"),
)
"""Modules by which a test, its fixtures or their helpers start processes, use a cluster, a server, a browser or an
engine, or fit weights."""
WEIGHTY = ("demo_model", "demo_calibration", "little_text", "empty_store", "tiny_job")
"""Fixtures whose tests take seconds: they convert the demo checkpoint, train, or write to a store."""
PATIENT = ("heavy", "slow", "extended")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the quick tests where `-m` selects by them, and put files with slow tests first, the slowest before all:
    otherwise the last ones run while a core is idle."""
    functions: set[tuple[Path, str]] = set()
    for item in items if "quick" in config.getoption("markexpr") else ():
        function = (item.path, item.nodeid.partition("[")[0])
        if function not in functions and _quick(item):  # the first case of a test
            functions.add(function)
            item.add_marker(pytest.mark.quick)

    def patience(item: pytest.Item) -> float:
        limit = item.get_closest_marker("timeout")
        long = item.get_closest_marker("slow") or item.get_closest_marker("extended")
        return (limit.args[0] if limit else 900.0) if long else 0.0

    longest: dict[Path, float] = {}
    for item in items:
        longest[item.path] = max(longest.get(item.path, 0.0), patience(item))
    items.sort(key=lambda item: -longest[item.path])


def _quick(item: pytest.Item) -> bool:
    """Whether a test is not marked as heavy, slow or extended and not of a property (a hundred examples), has no
    fixture of WEIGHTY, and names no module of OUTSIDE: neither itself, nor its fixtures, nor functions of the tests
    that these call."""
    if not isinstance(item, pytest.Function) or any(item.get_closest_marker(name) for name in PATIENT):
        return False
    if hasattr(item.function, "hypothesis") or not set(WEIGHTY).isdisjoint(item.fixturenames):
        return False
    defined = item._fixtureinfo.name2fixturedefs
    reached = {item.function, *(fixture.func for name in item.fixturenames for fixture in defined.get(name, ()))}
    waiting = list(reached)
    while waiting:
        modules, functions = _named(waiting.pop())
        if any(module == name or module.startswith(f"{name}.") for module in modules for name in OUTSIDE):
            return False
        waiting += functions - reached
        reached |= functions
    return True


@cache
def _named(function: Any) -> tuple[frozenset[str], frozenset[Any]]:
    """Modules that a function imports or takes something from, and functions of the tests that it names."""
    function = inspect.unwrap(function)
    codes, names = [function.__code__], set()
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    modules, functions = set(names), set()  # an import within the function is a name of its code too
    for value in (function.__globals__[name] for name in names & function.__globals__.keys()):
        module = value.__name__ if isinstance(value, ModuleType) else str(getattr(value, "__module__", ""))
        modules.add(module)
        if str(getattr(sys.modules.get(module), "__file__", "")).startswith(str(TESTS)):
            parts = vars(value).values() if inspect.isclass(value) else (value,)
            functions |= {part for part in parts if inspect.isfunction(part)}
    return frozenset(modules), frozenset(functions)


SHARED = {
    "on the Ray cluster": ("ray_cluster", "on_group"),
    "with workers of torch": ("on_all", "on_both"),
    "with the harness of tasks": ("evaluation.task_files",),
    "with the demo checkpoint's calibration": ("demo_calibration",),
}
"""Files that are run by the same process, since they share what takes long to start or to import: words in them."""


class ByFile(LoadFileScheduling):
    """Put a file's tests on one of pytest-xdist's workers, and all files that share a Ray cluster and its training
    workers, or anything else that is `SHARED`, on the same one: another worker would start half a dozen processes."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        text = _text(self.config.rootpath / file)
        if any(
            script in text for script in ("from chaos import", "gpu_cloud.py", "two_kinds.py", "elastic_cluster.py")
        ):
            return "clusters of their own"  # a Ray job connects to any other head on the machine
        return next((name for name, words in SHARED.items() if any(word in text for word in words)), file)


@cache
def _text(file: Path) -> str:
    return file.read_text()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def user_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes the user's cache and searches; other processes have the same folders."""
    for name in ("HEADFOLD_CACHE", "HEADFOLD_HOME"):
        os.environ[name] = str(tmp_path_factory.mktemp(name.lower()))


@pytest.fixture(scope="session", autouse=True)
def _two_cores() -> None:
    """Tests run in parallel with each other and with Ray workers: one thread each is faster than competing ones."""
    torch.set_num_threads(1)


@pytest.fixture
def fgpu() -> Iterator[torch.device]:
    """An emulated GPU, for the time of the test: what CUDA refuses raises on it (`emulated_device.py`).

    With HEADFOLD_TEST_DEVICE=cuda in the environment, the first GPU of this machine instead.
    """
    if os.environ.get("HEADFOLD_TEST_DEVICE") == "cuda":
        yield torch.device("cuda:0")
        return
    with emulated_device.emulated_device() as device:
        yield device


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """Folder of the demo checkpoint."""
    return DEMO


@pytest.fixture(scope="session")
def demo_model() -> PreTrainedModel:
    """The demo checkpoint in float32, in evaluation mode. Shared by the session: do not change it."""
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def demo_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no role ' ~ message.role) }}{% endif %}"
    "[{{ message.role }}] {{ message.content }}\n{% endfor %}"
)


@pytest.fixture(scope="session")
def chat_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the demo checkpoint with a tokenizer of a chat model: a special token begins every text, and a template
    writes conversations, that token included."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to(DEMO / name)
    state = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    first = next(word for word, token in state["model"]["vocab"].items() if token == BEGINNING)
    special = {"id": first, "ids": [BEGINNING], "tokens": [first]}
    own = {"SpecialToken": {"id": first, "type_id": 0}}
    state["added_tokens"].append(state["added_tokens"][0] | {"id": BEGINNING, "content": first})
    state["post_processor"]["single"].insert(0, own)
    state["post_processor"]["pair"].insert(0, own)
    state["post_processor"]["special_tokens"] = {first: special}
    (folder / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    settings = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"bos_token": first, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def chat_tokenizer(chat_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(chat_dir)


@pytest.fixture(scope="session")
def little_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of some 60,000 tokens, 3,000 of them held out, for tests that are about weights: the standard library
    takes seconds to read."""
    file = tmp_path_factory.mktemp("texts") / "words.jsonl"
    words = [line for module in (argparse, inspect) for line in inspect.getsource(module).splitlines()]
    records = ({"text": "\n".join(words[i : i + 12])} for i in range(0, len(words), 12))
    file.write_text("\n".join(map(json.dumps, records)))
    return str(file)


EMBEDDINGS = ("embed_tokens", "embed_positions", "embed_in", ".wte.", ".wpe.")


@torch.no_grad()
def _fill(model: PreTrainedModel, seed: int) -> None:
    """Random values of a size that matters: attention far from uniform, biases and norm weights far from neutral."""
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.copy_(normal(parameter, 0.5))
        elif parameter.dim() == 1:
            parameter.copy_(1 + normal(parameter, 0.2))
        elif any(part in name for part in EMBEDDINGS):
            parameter.copy_(normal(parameter, 1.0))
        else:
            transposed = ".c_" in name  # GPT-2's Conv1D keeps [in, out]
            parameter.copy_(normal(parameter, 1.5 / math.sqrt(parameter.shape[0 if transposed else -1])))


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """`tiny_model(family, *, seed=0, dtype=float32, **config)`: a random model, 2 layers of 4 heads of 8, made afresh.

    Families: the keys of TINY. Every bias that the family has is random; `attention_bias=True` gives Llama, Gemma and
    Qwen3 theirs. Families without a grouped form refuse `num_key_value_heads`.
    """

    def make(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
        config, own = TINY[family]
        dropped = {key for key, value in own.items() if value is None and key not in NONE_IS_A_VALUE}
        if refused := dropped & set(overrides):
            raise ValueError(f"{family} has no setting {sorted(refused)}")
        settings = {k: v for k, v in (TINY_SETTINGS | own | overrides).items() if k not in dropped}
        model = AutoModelForCausalLM.from_config(config(**settings), dtype=dtype)
        _fill(model, seed)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def tiny_job(tiny_model: Callable[..., PreTrainedModel]) -> Callable[..., TrainJob]:
    """`tiny_job(folder, plan, train, held_out, settings, **fields)`: a job for a converted tiny Llama.

    Its untouched original is the teacher; `train` and `held_out` are sequences of tokens. All files are in `folder`.
    """

    def make(
        folder: Path, plan: AttentionPlan, train: Tensor, held_out: Tensor, settings: TrainSettings, **fields: Any
    ) -> TrainJob:
        original = tiny_model("llama")
        checkpoint.save(original, folder / "teacher")
        checkpoint.save(convert(original, plan), folder / "model")
        write_sequences(train, folder / "train")
        write_sequences(held_out, folder / "eval")
        return TrainJob(
            model_dir=str(folder / "model"),
            teacher_dir=str(folder / "teacher"),
            train_file=str(folder / "train"),
            eval_file=str(folder / "eval"),
            out_dir=str(folder / "whole" / "out"),
            storage_path=str(folder / "store"),
            run_name="whole",
            settings=settings,
            seed=2,
            **fields,
        )

    return make


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables and nothing in them, to be copied: making one takes seconds."""
    from orchestrator.tracking.runs import default_uri, open_client

    folder = tmp_path_factory.mktemp("store")
    open_client(default_uri(folder)).search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def tracker(tmp_path: Path, empty_store: Path) -> Tracker:
    """A tracker whose database is in `tmp_path`."""
    from orchestrator.tracking.runs import Tracker

    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return Tracker.open(None, "tests", tmp_path)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A real Ray of two logical CPUs on this machine, for the session. Its address is the process's default.

    The dashboard is on because Ray Train's cleaner requests the leftovers of a stopped trial from it; without it
    placement groups stay and later trials wait for ever. The intervals are short because the tests' trainings are.
    """
    import ray

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{port}",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
        "RAY_worker_niceness": "0",  # 15 by default: its workers would starve while other tests run
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_metrics_report_interval_ms": "1000",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=True,
            dashboard_port=port,
            logging_level="WARNING",
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def on_all() -> Iterator[Callable[..., list[Any]]]:
    """`on_all(number, folder, work, *args)`, see `worker_groups.several_workers`, from one process for all tests."""
    from worker_groups import several_workers

    with several_workers() as on_all:
        yield on_all


@pytest.fixture(scope="session")
def on_both(on_all: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`on_all` with two of them."""
    return lambda folder, work, *args: on_all(2, folder, work, *args)


@pytest.fixture(scope="session")
def on_group(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], Any]]:
    """`on_group(job)`: `run_training(job)` by Ray Train workers that stay, so that only the first of many jobs waits
    for processes. Jobs of 0.4 CPUs per worker leave room for groups of one and of two, and for a separate run."""
    from orchestrator.cluster.pool_client import open_pool, train_on_pool

    with open_pool(str(tmp_path_factory.mktemp("groups")), idle_seconds=600) as pool:
        yield lambda job: train_on_pool(pool, job, lambda report: None)
