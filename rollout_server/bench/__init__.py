"""Benchmarks of the rollout server; reached by `rollmesh bench NAME`."""
