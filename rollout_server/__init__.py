"""The rollout server: sessions over an engine that stamps every token with the policy version that sampled it."""
