"""The parts of a GGUF file: metadata, tensors, vocabulary, and reading one back."""
