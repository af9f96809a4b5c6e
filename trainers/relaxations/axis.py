"""The axis of relaxations: how fewer heads are reached while training."""

from attention.axes import Axis

RELAXATION = Axis("relaxation", "trainers.relaxations")
