"""Scripts that run inside an engine's own Python. They import nothing of Headfold: JSON file in, one line of JSON out."""
