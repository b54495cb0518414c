"""Care for a store: giving back what nobody reaches, finding damage, saving what is left."""
