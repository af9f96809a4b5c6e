"""Model cards, and the upload to a hub: a small fake of its HTTP interface on this machine, with the real client."""

from __future__ import annotations

import base64
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import run_here
from command_process import CommandProcess, commands
from hub_cache import put_in_hub_cache
from transformers import PreTrainedModel

from attention.checkpoint import Checkpoint
from attention.conversion.convert import convert
from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from orchestrator.checkpoints import base_of
from orchestrator.reporting.card import CARD, FACTS, PICTURE, CardFacts, card_of, write_card
from orchestrator.storage.json_files import write_json

TOGETHER = LayerPlan((0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 1, 1, 2, 2, 3, 3))
APART = LayerPlan((0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 2, 3, 0, 1, 2, 3))
TOKEN = "hf_SecretOfATest123"
SCORES = {"few": {"acc": 0.5, "acc_stderr": 0.1, "items": 8}}
FACTS_KNOWN = CardFacts(
    base="small",
    base_id="someone/small",
    license="mit",
    recipe="headfold",
    kv_ratio=0.5,
    losses={"original model": 2.0, "this model": 2.1},
    tasks={"checkpoint": SCORES, "original": SCORES},
    trained={"steps": 40, "tokens": 81920, "data": "someone/texts"},
    datasets=["someone/texts"],
)


def converted(model: PreTrainedModel, folder: Path, demo_dir: Path, layer: LayerPlan = TOGETHER) -> Path:
    note = checkpoint.original_note(64, 32, **base_of(demo_dir))
    record = {"recipe": {"name": "gqa"}, **note}
    return checkpoint.save(convert(model, AttentionPlan((layer,) * 4, head_dim=32)), folder, demo_dir, record=record)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory, demo_model: PreTrainedModel, demo_dir: Path) -> Path:
    """The demo checkpoint with half its KV heads, as `convert` writes it."""
    return converted(demo_model, tmp_path_factory.mktemp("card") / "half", demo_dir)


def front_of(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_an_export_has_a_card_with_metadata_and_a_picture_and_is_whole(
    half: Path, tmp_path: Path, demo_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_here("export", half, "--target", "gqa", "--out", out, "--json", tmp_path / "e.json") == 0
    card = (out / CARD).read_text()
    front = front_of(card)
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "text-generation")
    assert "license" not in front and "base_model" not in front, "of a folder neither is known"
    assert "stdlib-llama, converted to 50% of its KV cache, by recipe `gqa`" in card
    assert "look it up" in card
    assert (out / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert checkpoint.intact(out)
    assert str(tmp_path) not in card + (out / FACTS).read_text()
    assert "nothing was uploaded" not in capsys.readouterr().out
    assert run_here("export", half, "--target", "gqa", "--out", out, "--overwrite") == 0


def test_an_export_of_a_hub_name_has_the_facts_of_the_conversion(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = put_in_hub_cache(monkeypatch, tmp_path / "hub", "someone/half", half)
    out, file = tmp_path / "out", tmp_path / "e.json"
    assert run_here("export", name, "--target", "gqa", "--out", out, "--tensor-parallel", "2", "--json", file) == 0
    assert "converted to 50% of its KV cache, by recipe `gqa`" in (out / CARD).read_text()
    assert checkpoint.carried(out) == checkpoint.carried(half) != {}
    record = json.loads(file.read_text())
    assert record["kv_bytes_per_token_original"] == 2 * record["kv_bytes_per_token_after"]
    assert record["tensor_parallel"]["kv_bytes_per_token_per_gpu_original"] is not None


def test_a_hub_name_without_an_owner_stays_the_base(
    demo_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Checkpoint.open(put_in_hub_cache(monkeypatch, tmp_path / "hub", "small", demo_dir))
    assert CardFacts.of(opened.folder, opened.path).base == "small"


def test_an_export_whose_card_fails_leaves_nothing(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without its card would be refused as somebody else's, even with --overwrite."""
    out = tmp_path / "out"

    def fail(folder: Path, *_: Any) -> None:
        (folder / "README.md").write_text("unfinished")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("orchestrator.tasks.export.write_card", fail)
        assert run_here("export", half, "--target", "gqa", "--out", out) == 130
    assert not list(tmp_path.iterdir())
    assert run_here("export", half, "--target", "gqa", "--out", out) == 0
    assert checkpoint.intact(out)
    assert f"vllm serve path/to/{out.name}" in (out / "README.md").read_text()


def test_the_lines_for_transformers_run_as_they_stand(
    half: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = card_of(half, FACTS_KNOWN)
    lines = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert lines
    monkeypatch.chdir(half.parent)
    exec(lines[1].replace("path/to/", ""), {})
    assert capsys.readouterr().out.startswith("Once upon a time")
    assert f"vllm serve path/to/{half.name}\n" in card and f"convert_hf_to_gguf.py path/to/{half.name} " in card


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
        {"model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 4, "head_dim": 16},
    ],
    ids=["wide heads", "a head dim of Qwen2"],
)
def test_what_the_script_of_llama_cpp_misreads_is_exported(config: dict[str, Any], tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config)
    write_json(tmp_path / "export.json", {"engines": ["llama.cpp"]})
    card = card_of(tmp_path, CardFacts(), "me/wide")
    assert "convert_hf_to_gguf" not in card
    assert "headfold export model --target gguf --out model-gguf " in card
    assert "llama-server -m model-gguf/model.gguf\n" in card
    write_json(tmp_path / "config.json", {**config, "head_dim": 8, "rope_parameters": {"rope_type": "default"}})
    assert "convert_hf_to_gguf" in card_of(tmp_path, CardFacts(), "me/wide")


def test_all_that_is_known_is_on_the_card(half: Path, tmp_path: Path) -> None:
    card = card_of(half, FACTS_KNOWN, "me/quarter")
    front = front_of(card)
    assert front["base_model"] == "someone/small"
    assert front["license"] == "mit"
    assert front["datasets"] == ["someone/texts"]
    assert "# quarter" in card and '"me/quarter"' in card
    assert "| this model | 2.100 |" in card
    assert "| few | acc | 8 | 0.500 ± 0.100 | 0.500 ± 0.100 |" in card
    assert "| tokens | 81,920 |" in card
    assert "Checked in engines" not in card
    write_json(tmp_path / FACTS, json.loads(json.dumps(FACTS_KNOWN.__dict__)))
    assert CardFacts.of(tmp_path) == FACTS_KNOWN


def test_engines_that_have_checked_it_are_a_table(half: Path, tmp_path: Path) -> None:
    run = {"how": "f16 cache", "prompts": 8, "tokens": 256, "same": 8, "difference": 0.0004, "tolerance": 0.01}
    check = {"engine": "llama.cpp", "version": "llama.cpp b1", "runs": [run], "cache_dtype": "float16"}
    check |= {"kv_bytes_per_token": 2048.0, "kv_bytes_per_token_promised": 2048}
    check |= {"capacity": 524288, "memory": 2**30}
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    write_json(tmp_path / "export.json", {"check": check, "engines": ["llama.cpp"]})
    card = card_of(tmp_path, CardFacts(base="small"), "me/gguf")
    row = "| llama.cpp b1 | 2,048 | 2,048 | 8 of 8 prompts, f16 cache | within 0.0004 | 524,288 in 1 GiB of float16 |"
    assert row in card
    assert front_of(card)["library_name"] == "gguf"
    assert "llama-server --hf-repo me/gguf --hf-file model.gguf" in card
    assert "AutoModelForCausalLM" not in card


def test_a_folder_with_bundled_code_says_so_and_our_own_format_too(
    tmp_path: Path,
    demo_model: PreTrainedModel,
    demo_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_json(tmp_path / "config.json", {"model_type": "nemotron-nas", "auto_map": {}})
    write_json(tmp_path / "export.json", {"engines": ["vLLM"]})
    assert f"vllm serve path/to/{tmp_path.name} --trust-remote-code" in card_of(tmp_path, CardFacts())
    own = converted(demo_model, tmp_path / "apart", demo_dir, APART)
    card = card_of(own, CardFacts.of(own))
    assert "vllm" not in card
    assert "headfold export path/to/apart --target transformers --out path/to/apart-transformers\n" in card
    lines = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert lines and "pip install" in lines[1]
    monkeypatch.chdir(tmp_path)
    exec(lines[1].replace("path/to/", ""), {})
    assert capsys.readouterr().out.startswith("Once upon a time")
    assert "library_name" not in front_of(card)


def test_a_model_that_was_not_converted_is_not_called_so(demo_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models--someone--small" / "snapshots" / "abc"
    shutil.copytree(demo_dir, folder)
    facts = CardFacts.of(folder)
    card = card_of(folder, facts)
    assert "# someone/small\n" in card and "no heads are converted" in card and "smaller KV cache" not in card
    assert front_of(card)["base_model"] == "someone/small" and "base_model_relation" not in front_of(card)
    assert CardFacts.of(write_card(folder, facts).parent) == facts


def test_names_of_a_base(tmp_path: Path) -> None:
    assert base_of("someone/small") == {"base": "someone/small", "base_id": "someone/small", "license": None}
    snapshot = tmp_path / "models--some-one--small-1b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / CARD).write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Small\n")
    named = {"base": "some-one/small-1b", "base_id": "some-one/small-1b", "license": "apache-2.0"}
    assert base_of(snapshot) == named
    (snapshot / CARD).write_text("# no metadata\n")
    assert base_of(snapshot)["license"] is None


# ---- upload ---------------------------------------------------------------------------------------------------------


class FakeHub(ThreadingHTTPServer):
    """The parts of the hub that an upload needs: creates a repository, takes a commit with all files in it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.forget()

    def forget(self, refuses: int | None = None) -> None:
        """A new hub; `refuses`: the status with which it answers everything."""
        self.refuses = refuses
        self.tokens: set[str | None] = set()
        self.files: dict[str, bytes] = {}
        self.created: dict[str, Any] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, record: Any, status: int = 200) -> None:
        body = json.dumps(record).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer({"id": "me/quarter", "sha": "0" * 40, "siblings": [], "private": True})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.server.refuses:
            self._answer({"error": f"refused for {self.headers.get('Authorization')}"}, self.server.refuses)
        elif self.path.endswith("/repos/create"):
            self.server.created = json.loads(body)
            self._answer({"url": f"{self.server.address}/me/quarter"})
        elif "/preupload/" in self.path:
            requested = json.loads(body)["files"]
            plain = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in requested]
            self._answer({"files": plain})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer({"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.server.address}/me/quarter"})
        else:
            self._answer({})


@pytest.fixture(scope="module")
def served() -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def hub(served: FakeHub) -> FakeHub:
    served.forget()
    return served


@pytest.fixture(scope="module")
def elsewhere(served: FakeHub) -> Iterator[CommandProcess]:
    """The command in a process whose hub is the fake: its address is read when the hub's client is imported."""
    environment = {"HF_ENDPOINT": served.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    with commands(environment) as run:
        yield run


@pytest.fixture
def pushed(elsewhere: CommandProcess, half: Path) -> Callable[..., Any]:
    return lambda out, *more: elsewhere("export", half, "--target", "gqa", "--out", out, "--push", "me/quarter", *more)


@pytest.mark.extended
def test_a_dry_run_shows_files_and_sizes_and_asks_the_hub_nothing(pushed: Any, tmp_path: Path, hub: FakeHub) -> None:
    ran = pushed(tmp_path / "out")
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"model\.safetensors  \d+\.\d MB", ran.stdout)
    assert "--push me/quarter --no-dry-run" in ran.stdout
    assert "lineage.json" not in ran.stdout and "export.json" not in ran.stdout
    assert not hub.tokens and not hub.files
    assert TOKEN not in ran.stdout + ran.stderr


def test_an_upload_carries_the_folder_without_what_names_this_machine(
    pushed: Any, tmp_path: Path, hub: FakeHub
) -> None:
    out = tmp_path / "out"
    ran = pushed(out, "--no-dry-run")
    assert ran.returncode == 0, ran.stderr
    assert hub.created["name"] == "quarter" and hub.created["organization"] == "me"
    assert hub.created.get("private") or hub.created.get("visibility") == "private"
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert set(hub.files) == {p.name for p in out.iterdir()} - {"export.json", "digests.json"}
    assert all(content == (out / name).read_bytes() for name, content in hub.files.items())
    assert all(str(tmp_path).encode() not in content for content in hub.files.values())
    assert TOKEN not in ran.stdout + ran.stderr


def test_a_refusal_does_not_show_the_token_and_the_export_stays(pushed: Any, tmp_path: Path, hub: FakeHub) -> None:
    hub.forget(refuses=403)
    ran = pushed(tmp_path / "out", "--no-dry-run")
    assert ran.returncode == 1
    assert "push to me/quarter" in ran.stderr and "403" in ran.stderr
    assert TOKEN not in ran.stdout + ran.stderr
    assert checkpoint.intact(tmp_path / "out")


@pytest.mark.parametrize(("name", "message"), [("quarter", "OWNER/NAME"), ("a/b/c", "no name"), ("me/--x", "no name")])
def test_a_name_that_cannot_be_is_refused_before_anything_is_exported(
    half: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert run_here("export", half, "--target", "gqa", "--out", tmp_path / "out", "--push", name) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_card_is_written_again_for_another_place(half: Path, tmp_path: Path, demo_model: PreTrainedModel) -> None:
    folder = checkpoint.save(demo_model, tmp_path / "plain")
    write_card(folder, FACTS_KNOWN)
    write_card(folder, FACTS_KNOWN, "me/elsewhere")
    assert "me/elsewhere" in (folder / CARD).read_text()
