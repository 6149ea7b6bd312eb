"""Memory of the trainer: which activations are kept, and what is held by the host while it is not used."""
