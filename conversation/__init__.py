"""The language of conversations: messages, templates, tools and their grammars, text from tokens; no jax."""
