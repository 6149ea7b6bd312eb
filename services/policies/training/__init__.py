"""Policies of the training steps: how a batch becomes them, and at which learning rate."""
