"""How far a run is, how fast it goes on, and what bounds it."""
