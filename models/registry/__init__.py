"""Published bundles: files and manifest of a version, names and their canaries, retention, and the store of all."""
