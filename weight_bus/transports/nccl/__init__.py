"""Broadcast by NCCL, or gloo where there is no GPU."""
