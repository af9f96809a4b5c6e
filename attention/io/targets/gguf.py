"""llama.cpp: one file `model.gguf` with weights, configuration and tokenizer.

Architecture `llama`, or `deci` where the head counts of layers differ; for Qwen3 `qwen3` or
`openelm`. Those of other families have one count for all layers, and a grouped GPT-NeoX is written
as Phi. Unequal groups are padded with zero query heads (`attention.io.targets._pairs`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from attention.base.messages import reason
from attention.conversion.convert import unshare
from attention.io.targets import EngineSupport, Lowered, Target, TargetError, gqa, phi
from attention.io.targets._gguf.architectures import (
    architecture,
    check_supported,
    shapes_of,
    with_own_counts,
)
from attention.io.targets._pairs import check_no_composition, kv_heads_of, written_out
from attention.io.targets._wide import lowering_wide, support_wide
from attention.modeling.model_classes import plan_of, plan_of_config
from attention.plan import AttentionPlan

FILE = "model.gguf"


@support_wide
def support_for(config: Any, plan: AttentionPlan) -> EngineSupport:
    """Return the KV heads of each layer in the file.

    The counts of layers may differ where llama.cpp supports that for the family, else all layers
    have one count as in target gqa.

    Raises:
        TargetError: For composition, for what llama.cpp lacks, and for a family without groups.
    """
    check_no_composition(plan, "gguf")
    if phi.is_needed(config, plan):
        return support_for(phi.phi_config(config), plan)
    check_supported(config, plan)
    if with_own_counts(config) is not None:
        shapes = shapes_of(plan, architecture(config, plan))
        return EngineSupport.of(
            kv_heads_of(plan), plan.head_dim, [count * width for count, width in shapes]
        )
    return gqa.support_for(config, plan)


@lowering_wide
def lower(model: PreTrainedModel) -> Lowered:
    """Return the model as it is, without weights shared between layers.

    Heads are padded when they are written.
    """
    plan = plan_of(model)
    support_for(model.config, plan)
    if phi.is_needed(model.config, plan):
        return phi.lower_as_phi(model, lower)
    form = architecture(model.config, plan)
    notes = [f"architecture {form.name}", *written_out(plan)]
    if form.own_counts and len(set(kv_heads_of(plan))) > 1:
        notes.append(
            "keep flash attention on (the default): without it all value caches are as wide as the "
            "widest"
        )
    return Lowered(unshare(model), tuple(notes))


def write(model: PreTrainedModel, folder: Path, dtype: str, tokenizer: Any = None) -> str:
    import gguf

    from attention.io.targets._gguf.metadata import write_metadata
    from attention.io.targets._gguf.tensors import encoded, tensors_of
    from attention.io.targets._gguf.vocabulary import add_vocabulary

    plan = plan_of(model)
    form = architecture(model.config, plan)
    writer = gguf.GGUFWriter(folder / FILE, form.name, use_temp_file=True)
    # Tensors are collected before the first is written, on the disk of the export and not in TMPDIR
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY, dir=str(folder)) as writer.temp_file:
        try:
            write_metadata(writer, model.config, form, plan)
            writer.add_file_type(_FILE_TYPES[dtype])
            add_vocabulary(writer, tokenizer, model.config.vocab_size)
            for name, tensor in tensors_of(model, form):
                data, kind = encoded(name, tensor, dtype)
                writer.add_tensor(name, data, raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
    return form.name


# Bytes of collected tensors that need no file.
_IN_MEMORY = 256 * 2**20
# llama.cpp's numbers: ALL_F32, MOSTLY_F16, ...
_FILE_TYPES = {"float32": 0, "float16": 1, "q8_0": 7, "bfloat16": 32}


def read(folder: Path, config: Any) -> PreTrainedModel:
    """Return the model of a written file, by its tensors and head counts.

    Raises:
        ValueError: For a file that is not whole.
    """
    import gguf
    import torch

    from attention.io.targets._gguf.tensors import fill

    form = architecture(config, plan_of_config(config))
    try:
        tensors = gguf.GGUFReader(folder / FILE).tensors
        stored = {
            t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy())
            for t in tensors
        }
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        fill(model, stored, form)
    except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise TargetError(
            f"{str(folder / FILE)!r} is not a whole GGUF file of this model: {reason(error)}"
        ) from None
    return model.eval()


TARGET = Target(
    "gguf",
    ("llama.cpp",),
    support_for,
    lower,
    write,
    read,
    ("float32", "bfloat16", "float16", "q8_0"),
)
