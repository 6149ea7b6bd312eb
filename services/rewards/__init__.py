"""The reward service: sandboxed reward functions, reward models over HTTP, and their composition."""
