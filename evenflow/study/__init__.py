"""Many runs: points, who simulates them, and what compares them."""
