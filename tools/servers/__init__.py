"""Real servers for tests, benchmarks and campaigns, gone with who started them."""
