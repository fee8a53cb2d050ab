"""The NVMe store: segments of self-describing records under an LMDB catalogue."""
