"""Pure-PyTorch references: the definition of correct. Imports nothing of ours."""
