"""Plays environments against the mesh: groups, episodes, evaluation."""
