"""Trainings: one run for trials, promotions, `headfold train` and `headfold finetune`.

The parts that the two verbs add to it: texts, a folder, progress.
"""
