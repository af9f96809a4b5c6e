"""Evaluation of a model in addition to its loss: harness tasks, generated text, long contexts."""
