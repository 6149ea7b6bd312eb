"""Rules of weight updates over a fleet of engines."""
