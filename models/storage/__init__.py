"""Where bundles and the records of names are kept: a folder, or an object store."""
