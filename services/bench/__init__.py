"""What the benchmarks of all rooms have in common."""
