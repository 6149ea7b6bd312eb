"""What a run shows of itself while it runs.

metrics.jsonl, rollouts/, progress.json, Redis, engines ──observer──► snapshot ──► a screen, or plain lines
"""
