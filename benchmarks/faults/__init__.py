"""Faults benchmark: services killed, Redis cut off and cut short in a whole mesh; what that costs a run."""
