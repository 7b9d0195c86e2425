"""What a storage format or an eviction costs a model, measured through its own scheduler, cache and kernels."""
