"""What every HTTP service shares: the application with its probes, authentication, the probe client."""
