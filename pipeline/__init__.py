"""The pipe itself: the only code that knows NATS. Everything above it speaks in messages, subjects and our own errors."""
