"""`./dev bench gateway`: the gateway beside bare engines, and servers killed under it."""
