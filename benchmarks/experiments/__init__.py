"""Whether verdicts, intervals, estimates and the join are right, on data whose truth is known."""
