"""The rules between ranking and answer: one list, one rule a file. Pure."""
