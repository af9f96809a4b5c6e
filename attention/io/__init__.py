"""Checkpoints on disk: reading, checking, writing, exporting to stock formats."""
