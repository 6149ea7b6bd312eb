"""Benchmarks of the weight bus; reached by `rollmesh bench weights`."""
