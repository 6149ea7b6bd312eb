"""`./dev bench weights`: weight updates under load beside paused reloads."""
