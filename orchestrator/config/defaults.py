"""Defaults that options of verbs and keys of a configuration share."""

CHECKPOINT_MINUTES = 30.0
"""Between two training checkpoints, of every training."""
