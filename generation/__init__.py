"""From a prompt to a reply: what the terminal, Python and the server share."""
