"""The storage service: pools, stores, the mover, the cache and the sidecar. Knows no model."""
