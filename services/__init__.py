"""The online side: doors, data plane, engine, stream worker, and the file that composes them."""
