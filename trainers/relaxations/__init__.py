"""Relaxations: trained ways from a checkpoint's heads to a plan's.

One file a part, a class, collected by the axis.
"""

from trainers.relaxations.base import RELAXATION_TRAINING, Relaxation, is_coarser, lifted

__all__ = ["RELAXATION_TRAINING", "Relaxation", "is_coarser", "lifted"]
