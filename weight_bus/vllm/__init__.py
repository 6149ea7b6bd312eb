"""The plug-in for vLLM: worker extension, weights, KV cache, endpoints of a plain `vllm serve`."""
