"""`rollmesh up`: starts the mesh on one machine, watches it, and leaves nothing behind."""
