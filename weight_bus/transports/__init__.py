"""Ways for bytes to travel from the publisher's arena to a receiver, behind one interface."""
