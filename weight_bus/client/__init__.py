"""Client side of the weight bus: HTTP client, engine membership, an engine's weight routes."""
