"""How the processes of one fit are started, watched, and started again."""
