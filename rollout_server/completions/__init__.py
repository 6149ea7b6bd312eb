"""Generation calls: chat, text and token completions over one service, turns, resumable answers."""
