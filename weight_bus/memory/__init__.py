"""Arenas (private or shared memory), and the CPU throttle of background copies."""
