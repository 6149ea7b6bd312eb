"""Which devices and cores each process of a mesh gets."""
