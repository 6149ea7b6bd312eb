"""`./dev bench staleness`: what each correction makes of tokens that are K optimizer steps old."""
