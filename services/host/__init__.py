"""This machine: the process, files and shared memory, the run folder, asyncio helpers."""
