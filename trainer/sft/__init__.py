"""The supervised warm start: demonstrations, the tiny model, training, its cache and accuracy."""
