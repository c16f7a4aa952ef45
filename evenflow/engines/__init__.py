"""What single serving engines do differently from the core."""
