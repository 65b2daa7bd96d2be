"""Impressions joined with clicks, experiments and canaries judged by tests that may be looked at always, and estimates of policies that did not run."""
