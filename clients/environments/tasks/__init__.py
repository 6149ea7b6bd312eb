"""Built-in tasks and their demonstrations."""
