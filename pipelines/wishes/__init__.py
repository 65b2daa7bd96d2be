"""Trains the reader of wishes: writes wishes from the catalogue's own words, and chooses what each part counts."""
