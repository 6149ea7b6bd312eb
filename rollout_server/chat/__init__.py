"""Chat as pure parts: messages ↔ tokens, which conversation a request continues, and answers as they stream."""
