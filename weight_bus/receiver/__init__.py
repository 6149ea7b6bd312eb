"""The engine's side: buckets are pulled and checked in the background, then committed."""
