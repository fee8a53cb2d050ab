"""Programs an operator runs. Everything below may be imported here; nothing imports this."""
