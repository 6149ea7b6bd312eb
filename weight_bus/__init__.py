"""The weight bus: publish, stage while generating, flip between two decode steps."""
