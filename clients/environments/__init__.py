"""Environments: the protocol, the built-in tasks, adapters of foreign libraries."""
