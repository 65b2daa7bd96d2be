"""A request on its way to a tier: context, candidates, stages, admission."""
