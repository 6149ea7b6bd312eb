"""Checkpoints and the log of optimizer steps."""
