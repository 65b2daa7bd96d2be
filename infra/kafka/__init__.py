"""The topics, and how they are made on a broker that keeps its data."""
