"""`./dev bench rollout`: the rollout server beside its engine and `vllm serve`."""
