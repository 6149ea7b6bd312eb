"""The trainer: stream to batches to gradient steps, with staleness that means what it says."""
