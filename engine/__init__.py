"""Token ids in, token ids out: the model, its scheduler, and its use of the tiered cache."""
