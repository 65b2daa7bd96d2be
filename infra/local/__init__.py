"""The embedded stack: every part as a child process of one supervisor."""
