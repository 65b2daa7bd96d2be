"""Generates rules, alerts, their tests, dashboards and the table in the docs from the objectives."""
