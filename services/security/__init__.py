"""Keys and their permissions, TLS, certificates."""
