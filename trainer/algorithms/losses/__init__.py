"""Policy losses, their registry, corrections for stale tokens, and the objective."""
