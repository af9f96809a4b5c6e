"""How a converted model is trained: one file a part.

A part is `f(**knobs) -> dict`: what it changes of the training's settings (`trainers.settings.TrainSettings`).
"""

from search_spaces.axes import RECOVERY

__all__ = ["RECOVERY"]
