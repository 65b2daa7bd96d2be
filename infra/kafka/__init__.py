"""Creation of topics on a broker with durable data."""
