"""Prewarming: documents in, blocks on NVMe out, before anyone asks a question about them."""
