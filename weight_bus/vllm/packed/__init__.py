"""Weights in the layout of a CPU's kernels, which follow the served version."""
