"""What the containers of the image run."""
