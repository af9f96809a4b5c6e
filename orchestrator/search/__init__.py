"""A search: candidates, searchers, schedulers, trials, Tune's run of them, and resumption."""
