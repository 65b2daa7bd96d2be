"""The live catalogue: item states in columns, indexed like the live bundle, for filters and rules."""
