"""What people look at: figures, pages, tables of the terminal, the status of a running search."""
