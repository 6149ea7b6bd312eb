"""Processes that run a user's reward function: the worker, its child for each call, and their confinement."""
