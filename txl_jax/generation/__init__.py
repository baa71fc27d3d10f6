"""Generation: samples the next token and continues prompts with memory."""
