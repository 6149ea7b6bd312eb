"""What benchmarks of other rooms play."""
