"""Several runs' adapters on one engine core, each in a slot of its own."""
