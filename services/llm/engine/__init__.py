"""The paged engine: scheduler, block pool, prefix cache, beam search. Needs torch and numpy alone."""
