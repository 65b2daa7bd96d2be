"""Reader of tables: file -> named columns -> normalised rows -> accepted, or set aside with row number and reason."""
