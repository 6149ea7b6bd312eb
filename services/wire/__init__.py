"""What crosses a process boundary: packed arrays, msgspec structs, HTTP bodies, typed errors."""
