"""What lets agent frameworks keep their state in a store; each needs its own extra."""
