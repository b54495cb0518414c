"""Care for a store: giving back what nobody reaches."""
