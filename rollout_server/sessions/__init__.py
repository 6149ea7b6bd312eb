"""Sessions and groups in memory: captured tokens, responses kept for retries, access."""
