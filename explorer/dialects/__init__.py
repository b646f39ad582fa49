"""The API dialects of OpenAI and Anthropic, translated to chat completions and back."""
