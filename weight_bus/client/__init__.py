"""Clients of the coordinator, and an engine's membership."""
