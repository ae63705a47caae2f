"""The OpenAI API over HTTP, a page to chat, and the thread that owns the engine behind them."""
