"""The trainer on several ranks."""
