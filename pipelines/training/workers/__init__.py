"""Starts, watches and restarts the processes of one fit."""
