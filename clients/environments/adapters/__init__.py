"""Environments of foreign libraries, and of a user's own Python."""
