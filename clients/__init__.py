"""What an environment author or an operator imports. Never torch, never vLLM."""
