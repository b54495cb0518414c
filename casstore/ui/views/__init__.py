"""The content of each page as plain data: read from a store, and bounded in size."""
