"""StageCache with cached outputs, the run lock, and progress bars."""
