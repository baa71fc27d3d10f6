"""Generation: choosing a next token, and continuing prompts with memory."""
