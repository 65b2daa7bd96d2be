"""Errors of the planner's training predictions against published runs, and the fit of its constants to them."""
