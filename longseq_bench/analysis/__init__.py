"""Records to typed rows, and statistics over them."""
