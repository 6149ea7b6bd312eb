"""The trainer's side of the weight bus: copy, hash and export weights as a manifest."""
