"""How far the planner's predictions of training are from published runs, and the fit of its constants to them."""
