"""Output for users: figures, pages, tables of the terminal, the status of a running search."""
