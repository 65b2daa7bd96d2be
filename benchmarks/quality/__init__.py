"""Ranking quality of decoder, student, baselines by seed, split and data set, and the gain of routing to the LLM."""
