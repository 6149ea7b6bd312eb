"""Weight transports (NIXL/RDMA, NCCL/gloo, shared memory, file) behind one interface."""
