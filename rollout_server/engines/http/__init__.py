"""The HTTP engine: an external vLLM or rollout server."""
