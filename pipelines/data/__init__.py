"""Events and items from raw files to training examples."""
