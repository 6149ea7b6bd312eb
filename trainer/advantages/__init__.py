"""Advantages: how much better a trajectory, or a token, did than was to be expected. One estimator a file."""
