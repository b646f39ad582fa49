"""The agent of examples/email_search written with the Agents SDK of OpenAI."""
