"""The command line and what it needs: building runs, writing results, comparing schedulers."""
