"""What a policy version is, byte for byte: manifest, layout of buckets, deltas, snapshots."""
