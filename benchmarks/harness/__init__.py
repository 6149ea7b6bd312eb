"""What benchmarks share: processes, servers, workloads and rounds."""
