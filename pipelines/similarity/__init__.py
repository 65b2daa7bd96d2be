"""Similar items: neighbours by co-visits and by item vectors, and the mix of both that predicts held-out next items best."""
