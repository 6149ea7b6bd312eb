"""The collective transport: broadcast by NCCL, or gloo where there is no GPU."""
