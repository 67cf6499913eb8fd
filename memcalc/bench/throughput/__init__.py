"""Published training speeds against the time model: who is faster, what choosing by it costs, and how far off the clock is."""
