"""The engine's side of the weight bus: pull and verify buckets in the background, then commit."""
