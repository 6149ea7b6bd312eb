"""Looks at one run, shared by all pages that show it, and the events that tell them what has changed."""
