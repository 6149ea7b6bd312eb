"""Weight manifests: layout, buckets, hashes, deltas, snapshots."""
