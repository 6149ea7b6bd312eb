"""Model folders by name: from a Python package, or from the Hugging Face Hub."""
