"""Removes erased users from stores and files."""
