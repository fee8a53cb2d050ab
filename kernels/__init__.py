"""Tensors in, tensors out: attention over paged KV. Knows nothing of caches, tiers or requests."""
