"""What a run would take of memory, without it: `rollmesh memory`."""
