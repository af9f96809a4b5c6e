"""Defaults that options of verbs and keys of a configuration share."""

CHECKPOINT_MINUTES = 30.0
"""Between two training checkpoints, of every training."""

DISTILLED_RATE = 1e-4
"""Peak learning rate of a training whose loss is KL(original ‖ model)."""
