"""A smaller KV cache for a pretrained transformer, from Python.

    import headfold

    model = "meta-llama/Llama-3.2-1B"
    result = headfold.convert(model, kv_ratio=0.5, data=texts, output_dir="half")
    print(result)

The functions run the tasks of the command line. Importing the package registers the classes of
Headfold's own format with transformers, so that `AutoModelForCausalLM.from_pretrained` opens its
checkpoints too.
"""

from attention.checkpoint import Checkpoint
from attention.modeling.model_classes import register
from headfold.functions import convert, evaluate, export, inspect, load
from headfold.results import ConversionResult, EvaluationResult, ExportResult, InspectionResult

__all__ = [
    "Checkpoint",
    "ConversionResult",
    "EvaluationResult",
    "ExportResult",
    "InspectionResult",
    "convert",
    "evaluate",
    "export",
    "inspect",
    "load",
]

register()
