"""Trainings outside of a search: from random weights (`headfold train`) and of a checkpoint (`headfold finetune`)."""
