"""Automatic releases: compares candidate and live version by impressions and clicks, and moves each release."""
