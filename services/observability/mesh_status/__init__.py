"""Status of a run's mesh, for `rollmesh status` and `rollmesh doctor`: registry, queue, trainer, waits and their causes."""
