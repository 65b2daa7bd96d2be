"""Which models a process has in memory: a pure state machine, and the threads that load and unload."""
