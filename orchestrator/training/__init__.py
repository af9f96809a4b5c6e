"""Trainings: one run for trials, promotions, `headfold train` and `headfold finetune`.

What the two verbs have beside it: texts, a folder, progress.
"""
