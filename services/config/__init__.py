"""Settings: one typed tree (`settings`), its sections, and how a file and overrides are read."""
