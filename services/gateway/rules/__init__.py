"""The rules between ranking and answer, applied in one list, one rule per file. Pure."""
