"""The ground every service stands on, and the mesh's own small services."""
