"""The three paths of docs/howto/paths.md, word for word, in an environment with Headfold's wheel.

The bundled checkpoints stand for the models of the page, with small budgets. Programs that are not here, vLLM and
kubectl, are stood for by ones that look at what they are given: a checkpoint that the engine would load, and manifests.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from clean_environment import CleanEnvironment
from own_config_job import checked_config

from orchestrator.storage.json_files import read_json
from trainers.text.corpora import LIBRARY

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "howto" / "paths.md").read_text()
ENGINEER, RESEARCHER, PLATFORM = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
LITTLE_TEXT = "data.train.tokens=20000 data.calibration.tokens=2048 data.eval.tokens=2048 data.sequence_length=128"
CHAT_TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
STAND_INS = {
    "vllm": 'test "$1" = serve && test -f "$2/config.json" && test -f "$2/model.safetensors" && echo "served: $2"',
    "kubectl": 'test "$1 $2" = "create -f" && cp "$3" created.yaml',
}


def engineer_has(place: Path, message: str) -> None:
    assert message.endswith("served: half\n")
    config = read_json(place / "half" / "config.json")
    original = read_json(place / "Qwen" / "Qwen3-8B" / "config.json")
    assert config["architectures"] == original["architectures"]
    assert 2 * config["num_key_value_heads"] == original["num_key_value_heads"]
    assert "chats.jsonl" in message and "on one H100" in message


def researcher_has(place: Path, message: str) -> None:
    arms = {"gqa", "asymgqa", "dha", "gqa_refined", "asymgqa_refined", "dha_refined"}
    assert all(re.search(rf"\b{arm}\b", message) for arm in arms)
    assert (place / "runs" / "smoke" / "report.html").is_file()
    assert "dry run: all checks passed" in message


def platform_has(place: Path, message: str) -> None:
    images = set(re.findall(r"image: (\S+)", (REPOSITORY / "deploy" / "raycluster.yaml").read_text()))
    with contextlib.chdir(place):  # the model is named as from there
        config = checked_config((place / "created.yaml").read_text(), images, place)
    own = yaml.safe_load((place / "search.yaml").read_text())
    assert (config.name, config.train.num_workers) == (own["name"], 4)
    assert re.search(r"^memory: ", message, re.MULTILINE)


@pytest.mark.extended
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("commands", "has"),
    [(ENGINEER, engineer_has), (RESEARCHER, researcher_has), (PLATFORM, platform_has)],
    ids=["engineer", "researcher", "platform"],
)
def test_a_path_leads_to_its_end(commands: str, has: Callable[[Path, str], None], tmp_path: Path) -> None:
    stranger, place = CleanEnvironment.make(tmp_path), tmp_path / "place"
    chat_model = shutil.copytree(REPOSITORY / "examples" / "prose-code-qwen3", place / "Qwen" / "Qwen3-8B")
    (chat_model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (place / "MODEL").symlink_to(REPOSITORY / "examples" / "stdlib-llama")
    (place / "deploy").symlink_to(REPOSITORY / "deploy")
    for program, does in STAND_INS.items():
        (stranger.bin / program).write_text(f"#!/bin/sh\n{does}\n")
        (stranger.bin / program).chmod(0o755)
    texts = [file.read_text(errors="ignore")[:6000] for file in sorted(LIBRARY.glob("*.py"))]
    turns = [[{"role": "user", "content": "Explain."}, {"role": "assistant", "content": text}] for text in texts]
    for name, key, values in (("texts", "text", texts), ("chats", "messages", turns)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps({key: value}) + "\n" for value in values))
    little = commands.replace("compared-smoke.yaml", f"compared-smoke.yaml rungs.steps=[0,2] {LITTLE_TEXT}")
    little = little.replace("compared.yaml --dry-run", f"compared.yaml {LITTLE_TEXT} data.max_epochs=50 --dry-run")
    little = little.replace("--data chats.jsonl", "--data chats.jsonl --eval-tokens 4096")
    little = little.replace("--out half", "--out half --calibration-tokens 4096 --sequence-length 512")
    begun = time.monotonic()
    done = stranger.run("bash", "-euc", little, cwd=place, minutes=25)
    print(f"{time.monotonic() - begun:.0f} s")
    assert done.returncode == 0, done.stdout + done.stderr
    has(place, done.stdout)
