"""Overload protection: admission (serve, shed or refuse), the order of requests, and the limit at the edge."""
