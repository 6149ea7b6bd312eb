"""`./dev bench telemetry`: what figures and traces cost a rollout server."""
