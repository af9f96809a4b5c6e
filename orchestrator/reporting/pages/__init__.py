"""The HTML pages of a search and of a checkpoint, through one template."""
