"""Other session stores behind one interface, for comparison."""
