"""The model's passes: packed rows, attention, logprobs, critic, roles, and the optimizer step."""
