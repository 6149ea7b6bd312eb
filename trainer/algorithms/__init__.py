"""Losses and advantages, and what a choice of them computes, as text."""
