"""The one reader of tables: a file becomes named columns, these become normalised rows, and a row is accepted or set aside with its number and reason."""
