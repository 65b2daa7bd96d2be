"""The paged engine: scheduler, block pool, prefix cache, beam search. Needs only torch and numpy."""
