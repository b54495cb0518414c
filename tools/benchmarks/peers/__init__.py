"""Other ways to keep an agent's sessions, each behind the same few verbs, for comparison."""
