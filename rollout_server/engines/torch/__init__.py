"""The torch engine: scheduler, KV cache, prefill, decoding, sampling."""
