"""Settings of the trainer, section by section."""
