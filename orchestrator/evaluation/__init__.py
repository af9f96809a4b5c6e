"""What a model is worth beside its loss: tasks of a harness, generated text, long contexts."""
