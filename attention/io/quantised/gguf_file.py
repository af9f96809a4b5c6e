"""A GGUF file as a source.

Its config and tokenizer as transformers reads them, its tensors one at a time.

Families that llama.cpp's target of the export knows are read tensor by tensor, the inverse of what
it writes; others as a whole by transformers, in the dtype that is requested.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from attention.base.messages import reason
from attention.families import family_of, geometry_of
from attention.io import checkpoint
from attention.io.safetensors_files import WeightsError, listed
from attention.io.sources import CheckpointError
from attention.io.stock_files import GENERATION, put_tokenizer, write_both_forms
from attention.io.targets._gguf import vocabulary
from attention.io.targets._gguf.architectures import OF_FAMILY, Architecture, halve

SUFFIX = ".gguf"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROPE_FREQUENCIES = "rope_freqs.weight"
_LONGROPE = "rope_factors_"
_WIDEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, which scale scores by the model's width over its heads."""
SPECIAL_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file. Only headers are read until a tensor is requested."""

    path: Path

    @cached_property
    def reader(self) -> Any:
        """The file, mapped by a `gguf.GGUFReader`.

        Raises:
            CheckpointError: For a file that is not whole.
        """
        import gguf

        with self.path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise CheckpointError(
                    f"{str(self.path)!r} is not a GGUF file; download or copy it again"
                )
        try:
            return gguf.GGUFReader(self.path)
        except Exception as error:  # it parses any bytes, and may fail in any way
            raise CheckpointError(
                f"{str(self.path)!r} cannot be read as GGUF: {reason(error)}; download or copy it "
                f"again"
            ) from None

    def field(self, name: str, default: Any = None) -> Any:
        """Return a value of the header."""
        entry = self.reader.get_field(name)
        return default if entry is None else entry.contents()

    @cached_property
    def kinds(self) -> dict[str, int]:
        """Return how many numbers are stored in each of GGUF's types, the most frequent first."""
        counts: dict[str, int] = {}
        for tensor in self.reader.tensors:
            counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + int(
                tensor.n_elements
            )
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    @property
    def dtype(self) -> torch.dtype:
        """The type of most numbers in the file; bfloat16 where that is no floating-point type."""
        return FLOATS.get(next(iter(self.kinds), ""), torch.bfloat16)

    @property
    def rounded(self) -> list[str]:
        """The types of the file whose numbers were rounded, or are rounded to `dtype`."""
        names = [kind for kind in self.kinds if kind not in FLOATS]
        for name, dtype in FLOATS.items():
            if name in self.kinds and torch.promote_types(dtype, self.dtype) != self.dtype:
                tensors = (t for t in self.reader.tensors if t.tensor_type.name == name)
                plain = map(_plain, tensors)
                if any(not torch.equal(x, x.to(self.dtype).float()) for x in plain):
                    names.append(name)
        return names

    @property
    def numbers(self) -> int:
        return sum(self.kinds.values())

    def write_config(self, folder: Path) -> PretrainedConfig:
        """Put config.json, tokenizer and generation config into `folder`; returns the config.

        Raises:
            CheckpointError: For a file that transformers or Headfold cannot read.
        """
        architecture = str(self.field("general.architecture"))
        if int(self.field("split.count", 1) or 1) > 1:
            raise CheckpointError(
                f"{str(self.path)!r} is one of {self.field('split.count')} files; join them first: "
                "llama-gguf-split --merge FIRST_FILE WHOLE.gguf"
            )
        counts = self.field(f"{architecture}.attention.head_count_kv")
        if isinstance(counts, list) and len(set(counts)) > 1:
            raise CheckpointError(
                f"{str(self.path)!r} has KV head counts of each layer's own ({counts}): it was "
                f"converted already; "
                "give the original model, or the checkpoint that the file was exported from"
            )
        where: dict[str, Any] = {"gguf_file": self.path.name, "local_files_only": True}
        try:
            fields, _ = PretrainedConfig.get_config_dict(str(self.path.parent), **where)
        except Exception as error:
            raise CheckpointError(
                f"{str(self.path)!r}: transformers cannot read a GGUF file of architecture "
                f"{architecture}: "
                f"{reason(error)}; give the checkpoint that it was made from"
            ) from None
        fields = {name: value for name, value in fields.items() if not name.startswith("_")}
        fields.pop("quantization_config", None)
        fields |= self._rope(architecture) | {"dtype": str(self.dtype).removeprefix("torch.")}
        fields |= self._left_out(architecture, fields)
        config_file = folder / "config.json"
        config_file.write_text(
            json.dumps(fields, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8"
        )
        config = checkpoint.load_config(folder)
        config.architectures = [family_of(config).model_class.__name__]
        self._check_rotary_dims(architecture, geometry_of(config).rotary.dims)
        config.save_pretrained(folder)
        write_both_forms(folder)
        self._write_tokenizer(folder)
        return config

    def _left_out(self, architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return settings that transformers' reader leaves out or gets from its defaults.

        Raises:
            CheckpointError: For a model that its config class cannot describe.
        """
        settings: dict[str, Any] = {}
        if (width := self.field(f"{architecture}.attention.key_length")) is not None:
            settings["head_dim"] = int(width)
        if architecture == "llama":
            if self.field("llama.expert_count"):
                raise CheckpointError(
                    f"{str(self.path)!r} has experts, which are not read from a GGUF file of "
                    "architecture llama; give the checkpoint that it was made from"
                )
            settings["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
            settings["mlp_bias"] = "blk.0.ffn_up.bias" in self._tensors
            if fields.get("model_type") == "mistral":  # by its name; its class has a window
                settings["sliding_window"] = None
        if architecture == "stablelm" and "blk.0.attn_q_norm.weight" in self._tensors:
            raise CheckpointError(
                f"{str(self.path)!r} normalises queries and keys, which is not read from a GGUF "
                "file of architecture stablelm; give the checkpoint that it was made from"
            )
        if architecture == "phi3":  # 0: without a window
            settings["sliding_window"] = self.field("phi3.attention.sliding_window") or None
        if architecture == "qwen3moe":
            width = self.field("qwen3moe.expert_feed_forward_length")
            settings["moe_intermediate_size"] = int(width)
        if architecture == "gpt2":
            settings["n_positions"] = int(self.field("gpt2.context_length"))
        if architecture in _WIDEST_GEMMA:
            layers = int(self.field(f"{architecture}.block_count"))
            whole = int(self.field(f"{architecture}.embedding_length"))
            heads = int(self.field(f"{architecture}.attention.head_count"))
            widest = layers == _WIDEST_GEMMA[architecture]
            scale = whole // heads if widest else settings.get("head_dim", fields.get("head_dim"))
            settings["query_pre_attn_scalar"] = scale
        return settings

    def _check_rotary_dims(self, architecture: str, dims: int) -> None:
        stored = self.field(f"{architecture}.rope.dimension_count")
        if stored is not None and dims and int(stored) != dims:
            raise CheckpointError(
                f"{str(self.path)!r} rotates {stored} dims of a head, the config that is read from "
                f"it {dims}; give the checkpoint that it was made from"
            )

    def _rope(self, architecture: str) -> dict[str, Any]:
        """Return the scaling of rotary embedding, which transformers' reader leaves out."""
        kind = self.field(f"{architecture}.rope.scaling.type", "none")
        base = float(self.field(f"{architecture}.rope.freq_base", 10_000.0))
        if any(name.startswith(_LONGROPE) for name in self._tensors):
            raise CheckpointError(
                f"{str(self.path)!r}: rotary scaling of type longrope is not read from a GGUF "
                "file; give the checkpoint that it was made from"
            )
        if (factors := self._tensors.get(_ROPE_FREQUENCIES)) is not None:
            scaling = llama3_rope(_plain(factors), base)
            if scaling is None:
                raise CheckpointError(
                    f"{str(self.path)!r}: its rotary frequencies ({_ROPE_FREQUENCIES}) are not "
                    f"those of Llama 3; give "
                    "the checkpoint that it was made from"
                )
            return {"rope_parameters": scaling}
        if kind == "linear":
            factor = float(self.field(f"{architecture}.rope.scaling.factor", 1.0))
            scaling = {"rope_type": "linear", "rope_theta": base, "factor": factor}
            if architecture == "gemma3":  # layers with a window are not scaled
                window = float(self.field("gemma3.rope.freq_base_swa", 10_000.0))
                unscaled = {"rope_type": "default", "rope_theta": window}
                scaling = {"full_attention": scaling, "sliding_attention": unscaled}
            return {"rope_parameters": scaling}
        if kind not in ("none", ""):
            raise CheckpointError(
                f"{str(self.path)!r}: rotary scaling of type {kind} is not read from a GGUF file; "
                f"give the checkpoint "
                "that it was made from"
            )
        return {"rope_theta": base} if architecture == "stablelm" else {}

    def _write_tokenizer(self, folder: Path) -> None:
        if self.field("tokenizer.ggml.model", "none") == "none":
            return
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(self.path.parent), gguf_file=self.path.name
            )
        except Exception as error:
            raise CheckpointError(
                f"{str(self.path)!r}: its tokenizer cannot be read: {reason(error)}; give the "
                f"checkpoint that it was "
                "made from"
            ) from None
        if self.field("tokenizer.ggml.model") == "gpt2":
            self._set_split(tokenizer)
            if self.field("tokenizer.ggml.pre") in vocabulary.LLAMA_3:
                tokenizer.backend_tokenizer.model.ignore_merges = True
                if self.field("tokenizer.ggml.add_bos_token") is None:
                    tokenizer.add_bos_token = True
        put_tokenizer(tokenizer, folder)
        _drop_tokens_from(folder / "tokenizer.json", len(self.field("tokenizer.ggml.tokens", ())))
        ids = {
            key: self.field(f"tokenizer.ggml.{name}_token_id")
            for key, name in SPECIAL_TOKENS.items()
        }
        token_ids = {key: int(value) for key, value in ids.items() if value is not None}
        (folder / GENERATION).write_text(json.dumps(token_ids, indent=2) + "\n", encoding="utf-8")

    def _set_split(self, tokenizer: Any) -> None:
        """Let a byte-level tokenizer split text as llama.cpp does with this file.

        transformers' reader knows fewer of llama.cpp's rules, and takes GPT-2's for the others.
        """
        name = self.field("tokenizer.ggml.pre", "default")
        if (rule := vocabulary.pre_tokenizer(name)) is not None:
            tokenizer.backend_tokenizer.pre_tokenizer = rule
        elif "Split" not in str(tokenizer.backend_tokenizer.pre_tokenizer) and name != "default":
            raise CheckpointError(
                f"{str(self.path)!r}: llama.cpp's way of splitting text {name!r} is not known "
                "here; give the checkpoint that the file was made from"
            )

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        return {tensor.name: tensor for tensor in self.reader.tensors}

    def check(self, config: PretrainedConfig) -> None:
        """Check from headers alone that the file has the tensors of the config's model, no others.

        Raises:
            WeightsError: For tensors that are missing, and for such as the model has no place for.
        """
        if (form := form_of(config, str(self.field("general.architecture")))) is None:
            return
        from attention.io.targets._gguf.tensors import outside_attention

        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(config)
        stored = set(self._tensors)
        geometry = geometry_of(config)
        names = ["attn_qkv"] if form.fused else ["attn_q", "attn_k", "attn_v"]
        biases = dict.fromkeys(names, geometry.query_bias) | {"attn_output": geometry.output_bias}
        wanted = {stored_name for _, _, stored_name in outside_attention(model, form)}
        for layer in range(config.num_hidden_layers):
            for name, biased in biases.items():
                wanted.add(f"blk.{layer}.{name}.weight")
                if biased:
                    wanted.add(f"blk.{layer}.{name}.bias")
        if missing := wanted - stored:
            raise WeightsError(
                f"{str(self.path)!r} lacks {len(missing)} tensors: {listed(missing)}; copy it again"
            )
        if surplus := stored - wanted - {_ROPE_FREQUENCIES}:
            raise WeightsError(
                f"{str(self.path)!r} has {len(surplus)} tensors that the model read from it has no "
                f"place for: {listed(surplus)}; give the checkpoint that it was made from"
            )

    def tensors(self, config: PretrainedConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the config's model, by the names that its class has, in `dtype`.

        Raises:
            WeightsError: For a file that does not hold this model.
        """
        form = form_of(config, str(self.field("general.architecture")))
        if form is None:
            yield from self._whole(config, dtype)
            return
        self.check(config)
        try:
            yield from _one_by_one(self._tensors, config, form, dtype)
        except (ValueError, KeyError, IndexError, RuntimeError) as error:
            raise WeightsError(
                f"{str(self.path)!r} is not a whole GGUF file of the model that it describes: "
                f"{reason(error)}"
            ) from None

    def _whole(self, config: PretrainedConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Read the file by transformers; newer versions would leave weights in their blocks."""
        more: dict[str, Any] = {}
        try:
            from transformers import GgufConfig  # pyright: ignore[reportAttributeAccessIssue]
        except ImportError:
            pass
        else:
            more["quantization_config"] = GgufConfig(**_accepted(GgufConfig, dequantize=True))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(self.path.parent),
            gguf_file=self.path.name,
            dtype=dtype,
            output_loading_info=True,
            **more,
        )
        model, info = loaded
        checkpoint.weights.check_loaded(self.path, model, info)
        tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
        yield from (
            (name, tensor) for name, tensor in model.state_dict().items() if name not in tied
        )


def _accepted(kind: Any, **settings: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in settings.items()
        if name in inspect.signature(kind).parameters
    }


def _plain(tensor: Any) -> Tensor:
    """Return the numbers of one tensor of a file, in float32."""
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()


def form_of(config: PretrainedConfig, architecture: str) -> Architecture | None:
    """Describe the layout of a layer's heads in a file of this architecture.

    None where only transformers knows.
    """
    form = OF_FAMILY.get(family_of(config).name)
    return form if form is not None and form.name == architecture else None


@torch.no_grad()
def _one_by_one(
    stored: dict[str, Any], config: PretrainedConfig, form: Architecture, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file under the names of the model's class.

    No more than a layer's attention, or the parts of one tensor, is in memory at a time.
    """
    from attention.io.targets._gguf.tensors import (
        attention_names,
        outside_attention,
        reshaped,
        stored_heads,
    )

    with torch.device("meta"), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    family = family_of(config)
    geometry = geometry_of(config)
    state = model.state_dict()
    # The parts of one tensor (gate and up projections of experts) follow each other.
    unfinished: dict[str, Tensor] = {}
    for name, part, stored_name in outside_attention(model, form):
        for other in [other for other in unfinished if other != name]:
            yield other, unfinished.pop(other)
        whole = unfinished.setdefault(name, torch.empty(state[name].shape, dtype=dtype))
        whole[part].copy_(reshaped(name, _plain(stored[stored_name]), family, back=True))
    yield from unfinished.items()
    names = {layer: name for name, layer in attention_names(model).items()}
    for layer, module in enumerate(family.attention_modules(model)):
        prefix = f"blk.{layer}.attn_"
        tensors = {
            name: _plain(tensor) for name, tensor in stored.items() if name.startswith(prefix)
        }
        heads = stored_heads(tensors, layer, geometry.head_dim)
        module.to_empty(device="cpu")
        family.write(module, halve(heads, config) if form.interleaved else heads)
        for name, tensor in module.state_dict().items():
            if "norm" not in name:  # of queries and keys: read above
                yield f"{names[layer]}.{name}", tensor.detach().clone()
        module.to("meta")


def llama3_rope(factors: Tensor, base: float) -> dict[str, Any] | None:
    """Return the `rope_parameters` of Llama 3 that divide the rotary frequencies by `factors`.

    None if none do.

    Between its two bounds the factor's inverse is linear in the frequency, so that two points on it
    give both. One of four settings is free: `low_freq_factor` is 1, as in every published Llama 3.
    """
    inverse = 1 / factors.double()
    frequencies = base ** -(torch.arange(len(factors), dtype=torch.float64) / len(factors))
    largest = float(factors.max())
    if largest <= 1.0:
        return None
    turns = frequencies / (2 * torch.pi)  # per token: one over the wavelength
    smooth = (inverse - 1 / largest) / (1 - 1 / largest)
    between = ((smooth > 1e-4) & (smooth < 1 - 1e-4)).nonzero().flatten()
    high = 4.0  # of every published Llama 3, where the factors do not say
    if len(between) > 1:
        first = int(between[0])
        last = int(between[-1])
        slope = float((smooth[first] - smooth[last]) / (turns[first] - turns[last]))
        offset = float(slope * turns[first] - smooth[first])  # low / (high - low)
        high = 1 + 1 / offset
        length = slope / offset
    elif len(between):
        length = float((smooth[between] * (high - 1) + 1) / turns[between])
    else:
        # Anywhere between the last frequency that is unchanged and the first that is divided by the
        # whole factor.
        unscaled = int((smooth >= 1 - 1e-4).sum())
        bounds = high / turns[max(unscaled - 1, 0)], 1 / turns[min(unscaled, len(turns) - 1)]
        length = float((bounds[0] * bounds[1]).sqrt())
    scaling = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": round(largest, 4),
        "low_freq_factor": 1.0,
        "high_freq_factor": round(high, 3),
        "original_max_position_embeddings": round(length),
    }
    return (
        scaling
        if torch.allclose(_llama3_factors(scaling, turns), factors.double(), rtol=2e-4)
        else None
    )


def _llama3_factors(rope: dict[str, Any], turns: Tensor) -> Tensor:
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    factor = rope["factor"]
    smooth = ((turns * rope["original_max_position_embeddings"] - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _drop_tokens_from(file: Path, count: int) -> None:
    """Drop added tokens from id `count` on, which transformers' reader makes up for some files.

    A model that embeds no token with such an id could not be exported with it.
    """
    if not file.is_file():
        return
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    stored = [token for token in tokenizer["added_tokens"] if token["id"] < count]
    if len(stored) < len(tokenizer["added_tokens"]):
        content = json.dumps(tokenizer | {"added_tokens": stored}, ensure_ascii=False, indent=2)
        file.write_text(content, encoding="utf-8")
