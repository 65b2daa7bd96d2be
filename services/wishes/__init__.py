"""The encoder of wishes: texts to vectors."""
