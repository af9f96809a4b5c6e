"""Self-contained HTML pages: of a search, and of an inspected checkpoint."""
