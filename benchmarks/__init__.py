"""Benchmarks: what the mesh costs and what it is worth, beside what one would use instead; `./dev bench NAME` runs them."""
