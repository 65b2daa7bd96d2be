"""Writes docs/api.md from the OpenAPI document, recommend.proto and the error tables."""
