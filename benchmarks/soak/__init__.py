"""Hours of a stack in minutes: mixed load through all doors while faults come and go."""
