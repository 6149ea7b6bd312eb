"""Kept rollouts in the dashboard: found, read token by token, beside their siblings."""
