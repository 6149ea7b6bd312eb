"""The service that carries a weight update from manifest to commit on every engine."""
