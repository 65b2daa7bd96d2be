"""Similar items: neighbours by co-visits and by item vectors, and the mix that best predicts held-out next items."""
