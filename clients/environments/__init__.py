"""The environments that ship with rollmesh, one a file."""
