"""What a request needs before a tier ranks: load monitor, live bundle, context and candidates."""
