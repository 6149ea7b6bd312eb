"""The weight bus service: two-phase commit of a weight update on every engine."""
