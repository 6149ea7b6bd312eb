"""Arenas of pinned or shared memory, and the throttle of background copies."""
