"""The online side: doors, data plane, engine, stream worker, and the one file that composes them."""
