"""Files of a search: where they lie, records, locks, mirrors of remote storage, what is trusted."""
