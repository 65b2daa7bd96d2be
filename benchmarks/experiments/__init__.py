"""Whether verdicts, intervals and estimates are right, on data whose truth is known."""
