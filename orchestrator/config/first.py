"""`headfold init`: a first configuration for a checkpoint, with what its config.json and the machine tell."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from attention.geometry import HeadGeometry
from attention.io.targets.vllm import LLAMA_LIKE
from orchestrator.config.parsing import ConfigError

COMES_ALONG = ("builtin", "stdlib")
BILLION = 1_000_000_000
EXACT = 16  # KV heads up to which the best grouping is found by trying all
ADAM = 16  # bytes a trained parameter in bfloat16: weight, gradient, float32 copy, two moments
FULL = 0.7  # share of the GPUs' memory that these may take; the rest is for activations and logits


@dataclass(frozen=True)
class Place:
    """Where a search is to run: GPUs (0: it runs on CPUs), bytes of memory of each, CPUs."""

    gpus: int
    gpu_bytes: int
    cpus: int


@dataclass(frozen=True)
class FirstConfig:
    """What is known before a search: the checkpoint's name as it was given, its geometry, dtype (by name) and number of
    parameters; the text, and where it runs."""

    model: str
    geometry: HeadGeometry
    dtype: str
    parameters: int
    source: str
    place: Place
    schema: str
    dequantize: bool = False

    def text(self) -> str:
        """The YAML, with a comment on what each choice was made by. Raises ConfigError for a checkpoint that has
        nothing to convert."""
        g, size, length = self.geometry, f"{self.parameters / 1e6:.3g}M", self.length
        lasts, promoted = self.steps
        tokens = (lasts[-1] + promoted) * self.batch * length
        exact = "exact, " if g.num_kv_heads <= EXACT else ""
        layers = "headfold_layers, " if g.family in LLAMA_LIKE else ""  # those that vLLM holds in their own bytes
        return f"""\
# yaml-language-server: $schema={self.schema}
# A first search for {self.model}: {g.family}, {size} parameters in {self.dtype}, {g.num_layers} layers,
# {g.num_heads} query heads and {g.num_kv_heads} KV heads of {g.head_dim} in each.
#   headfold search FILE --dry-run    checks everything, and says what it will take
# Every key is explained in docs/reference/config.md. Where a key is left out its default holds.
name: {self.name}

model:
  path: {self.quoted(self.model)}
{self.reading}
data:
  source: {self.quoted(self.source)}    # {self.about_source}
  sequence_length: {length}    # the model takes up to {g.max_positions}
  train: {{tokens: {tokens}}}    # all steps of the longest training, each text once
  eval: {{tokens: {max(16_384, 8 * length)}}}    # held out: never trained or calibrated on
  calibration: {{tokens: {max(16_384, 8 * length)}}}

search:
  searcher: optuna
  recipes: [gqa, headfold_gqa, {layers}align]    # the baseline first
  {self.kept}
  learning_rates: [{"1.0e-5, 3.0e-5" if self.parameters >= BILLION else "1.0e-4, 3.0e-4"}]    # each recipe at its best
  num_samples: 4    # candidates that the searcher draws after the named ones, from this space:
  search_space:
    grouping: [{exact}merge, anneal]
    objective: [least_squares]
    together: [true]    # one map for keys and values: exports as plain GQA
  params: {{grouping.equal_sizes: true}}
  baseline: gqa    # never stopped early; what a promotion must beat

rungs:
  steps: {lasts}    # 0: the converted model before any training
  reduction_factor: 2    # about a half goes on at each

train:
  batch_size: {self.batch}
{self.training()}
promotion:
  steps: {promoted}    # after the last rung; the baseline is trained for as many
  registered_name: {self.name}

storage: runs    # a folder, for a cluster one that every node sees, or s3://bucket/path
{self.resources()}"""

    @property
    def reading(self) -> str:
        return "  dequantize: true    # its weights are quantised: read as plain numbers\n" if self.dequantize else ""

    @property
    def name(self) -> str:
        """The last part of the model's name, as a name of a search."""
        last = Path(self.model).name.lower().removesuffix(".gguf")
        return re.sub(r"[^a-z0-9._-]+", "-", last).strip("._-")[:64] or "search"

    @property
    def length(self) -> int:
        return min(self.geometry.max_positions, 2048 if self.parameters >= BILLION else 512)

    @property
    def steps(self) -> tuple[list[int], int]:
        """Rungs, and steps of the promotion: few on the little text that comes along."""
        return ([0, 20, 60], 60) if self.source in COMES_ALONG else ([0, 100, 400], 1000)

    @property
    def batch(self) -> int:
        wanted = 32 if self.parameters >= BILLION and self.source not in COMES_ALONG else 8
        return math.ceil(wanted / self.workers) * self.workers

    @property
    def workers(self) -> int:
        return max(1, self.place.gpus)

    @property
    def kept(self) -> str:
        """A half and a quarter, where there is a KV head for each layer in them."""
        count = self.geometry.num_kv_heads
        if count == 1:
            raise ConfigError(
                f"model: {self.model!r} has 1 KV head a layer already, so no heads are left to group; choose a "
                "checkpoint with 2 or more"
            )
        shares = [share for share in (2, 4) if count >= share]
        heads = " and ".join(f"{count / share:g}" for share in shares)
        most = "" if all(count % share == 0 for share in shares) else "at most "
        return f"kv_ratios: {[1 / share for share in shares]}    # {most}{heads} of its {count} KV heads a layer"

    @property
    def about_source(self) -> str:
        if self.source in COMES_ALONG:
            return "comes along, to try things out; put your own here: files, a folder, or a dataset on the hub"
        return "files, a folder, or a dataset on the hub"

    @property
    def full(self) -> bool:
        """Whether all weights can be trained where it runs."""
        return not self.place.gpus or ADAM * self.parameters <= FULL * self.place.gpus * self.place.gpu_bytes

    def training(self) -> str:
        """The rest of the section `train`."""
        place, large = self.place, self.parameters >= BILLION
        lines = [f"dtype: {'bfloat16' if place.gpus else 'float32'}"]
        lines += ["micro_batch_size: 1", "activation_checkpointing: true"] * large
        if not self.full:
            room = f"{place.gpus} x {place.gpu_bytes / 2**30:.0f} GiB"
            lines.append(f"tuning: lora    # all weights and Adam's moments do not fit {room}")
        lines.append(f"zero_stage: {3 if place.gpus > 1 and large else 1}")
        if place.gpus:
            lines += [f"num_workers: {place.gpus}", "gpus_per_worker: 1"]
        share = max(1.0, place.cpus // place.gpus - 1) if place.gpus else 0.95
        return "".join(f"  {line}\n" for line in [*lines, f"cpus_per_worker: {share:g}"])

    def resources(self) -> str:
        if not self.place.gpus:
            return ""
        return "\nresources:\n  trial_gpus: 1    # planning and measuring; free again while the workers train\n"

    @staticmethod
    def quoted(text: str) -> str:
        """As YAML takes any text."""
        return (
            text
            if re.fullmatch(r"[\w./-]+", text) and not text.startswith("-")
            else "'" + text.replace("'", "''") + "'"
        )
