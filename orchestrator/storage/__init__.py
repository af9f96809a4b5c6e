"""Files of a search: paths, records, locks, mirrors of remote storage, what is trusted."""
