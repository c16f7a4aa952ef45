"""`evenflow explore`: a page on loopback that simulates what its sliders say."""
