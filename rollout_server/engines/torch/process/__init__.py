"""An engine core in a process of its own."""
