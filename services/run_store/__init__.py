"""A run's state in Redis: keys, the trajectory stream, the ledger, admission, discovery, status."""
