"""The infinity-former: short-term attention and an unbounded continuous memory."""
