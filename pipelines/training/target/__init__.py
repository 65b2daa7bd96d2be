"""What is learned: losses, and the targets of decoder and student."""
