"""vLLM inside the rollout server."""
