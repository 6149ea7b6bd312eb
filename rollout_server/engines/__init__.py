"""Engines behind one interface (`base.Engine`): `torch` everywhere, `vllm` where it is installed."""
