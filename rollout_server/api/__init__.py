"""HTTP routes of the rollout server."""
