"""From the stream to packed rows: reading, validation, batching, staleness, packing."""
