"""Client of the rollout API: asynchronous and blocking, retries, the pool of servers."""
