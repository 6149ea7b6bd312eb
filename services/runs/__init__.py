"""Run folders, side by side: `rollmesh runs`, `rollmesh compare` and `rollmesh samples`. Reads files, no service."""
