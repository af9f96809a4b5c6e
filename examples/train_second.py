"""Make a second small checkpoint of another family on another kind of text: GPT-NeoX on prose.

    python examples/train_second.py --out runs/my-neox             # about a quarter of an hour on one core
    python examples/train_second.py --out /tmp/tiny --steps 2      # only to see it run

A result on one checkpoint may be luck. This one differs from `stdlib-llama` wherever a conversion
could depend on it: learned biases, fused and interleaved projections, rotary embedding on a quarter
of each head, parallel attention and MLP, and English instead of code. The prose is part of every
installation: Python's reference topics and the docstrings of its standard library and of the
packages that this project needs. It is written to `prose.jsonl`, a source of text like any other:

    headfold convert --model runs/my-neox/trained --recipe headfold --kv-ratio 0.5,0.25 \\
        --data runs/my-neox/prose.jsonl --sequence-length 256
"""

from __future__ import annotations

import ast
import importlib.util
import json
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

from train_demo import VOCABULARY, make_tokenizer, options, randomise, refuse_to_overwrite, train
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from trainers.text.corpora import NOT_LIBRARY, library_files

PACKAGES = ("numpy", "scipy", "torch")
SHORTEST = 200  # characters of a document


def without_code(text: str) -> str:
    """A text without the paragraphs that show an interactive session or announce a code block."""
    return "\n\n".join(p for p in text.split("\n\n") if ">>>" not in p and "::" not in p and p.strip())


def docstrings(file: Path) -> Iterator[str]:
    """The docstrings of a module. None for a file that cannot be parsed."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def documents(packages: tuple[str, ...] = PACKAGES) -> Iterator[str]:
    """Texts of some length, each once: topics, then docstrings by package and file name."""
    files = list(library_files())
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SystemExit(f"package {name} is not installed here; install it or leave it out with --packages")
        root = Path(spec.origin).parent
        paths = (f for f in root.rglob("*.py") if not NOT_LIBRARY.intersection(f.relative_to(root).parts))
        files += sorted(paths, key=lambda file: file.relative_to(root).as_posix())
    seen: set[str] = set()
    for raw in (*topics.values(), *(text for file in files for text in docstrings(file))):
        text = without_code(raw)
        if len(text) >= SHORTEST and text not in seen:
            seen.add(text)
            yield text


def make_model(seed: int) -> GPTNeoXForCausalLM:
    """The untrained model: 4 layers, hidden size 128, 8 heads of 16, of which 4 dims are rotary."""
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        use_parallel_residual=True,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPTNeoXForCausalLM(config)
    randomise(model, seed)
    return model


def learn(model: PreTrainedModel, texts: Iterable[str], kind: str, arguments: Namespace, name: str) -> None:
    """Write the texts to `KIND.jsonl` in the folder `given` by the command line; train a tokenizer and the model."""
    refuse_to_overwrite(arguments.out)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = (arguments.out / f"{kind}.jsonl").resolve()
    with file.open("w", encoding="utf-8") as stream:
        for text in texts:
            stream.write(json.dumps({"text": text}) + "\n")
    print(f"{kind}: {file.stat().st_size / 1e6:.1f} MB in {file}")
    train(model, make_tokenizer(str(file)), str(file), arguments, name=name, batch_size=16)


def main() -> None:
    parser = options(__doc__, steps=600, tokens=2_400_000, learning_rate=4e-3)
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help="whose docstrings are read")
    arguments = parser.parse_args()
    learn(make_model(arguments.seed), documents(tuple(arguments.packages)), "prose", arguments, "train-second")


if __name__ == "__main__":
    main()
