"""`kvtier replay`: the real cache over a request trace, without bytes."""
