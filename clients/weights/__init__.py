"""Client and command of the weight bus."""
