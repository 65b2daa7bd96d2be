"""How well decoder, student and baselines rank: over seeds, splits and data sets, and what routing to the LLM is worth."""
