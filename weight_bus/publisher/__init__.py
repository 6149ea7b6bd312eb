"""The trainer's side: tensors into buckets, exported and announced."""
