"""Ways to train a converted model.

A part is `f(**knobs) -> dict`: what it changes of the training's settings
(`trainers.settings.TrainSettings`).
"""
