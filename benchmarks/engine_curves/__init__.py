"""How the engine's cost grows with history, catalogue and beams."""
