"""The offline flow, a stage a file; run.py is the whole story."""
