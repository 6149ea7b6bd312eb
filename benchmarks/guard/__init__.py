"""`./dev bench guard`: whether this checkout costs more than another commit."""
