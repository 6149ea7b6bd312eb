"""Ranks of a trainer: its process group, and what is spread over them."""
