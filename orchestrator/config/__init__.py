"""The configuration of a search: its schema, and how it is read."""
