"""The step-time model and the machine limits it starts from."""
