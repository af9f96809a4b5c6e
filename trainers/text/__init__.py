"""Texts and tokens: sources, tokenizers, sequences, synthetic tasks."""
