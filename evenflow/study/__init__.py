"""Many runs: points, their simulation, and their comparison."""
