"""The demo: one model, three documents, every tier, in one process and through a sidecar."""
