"""How long it took: host clock and device events behind one protocol."""
