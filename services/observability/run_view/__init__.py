"""What a run's files, Redis and engines say of it, for the live view, the dashboard and `rollmesh runs`."""
