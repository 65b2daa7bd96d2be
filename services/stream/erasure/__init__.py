"""What an erased user leaves behind in stores and files, and how it is removed."""
