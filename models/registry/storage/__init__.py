"""Storage of bundles and name records: a folder, or an object store."""
