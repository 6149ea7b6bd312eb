"""The OpenAI dialect over sessions: chat and text completions, streaming and not, every token captured."""
