"""Scores of histories by a model, and the metrics of rankings. Beneath training and evaluation."""
