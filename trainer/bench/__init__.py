"""Benchmarks of the trainer and of the loop it closes; reached by `rollmesh bench NAME`."""
