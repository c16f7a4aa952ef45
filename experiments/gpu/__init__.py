"""All that is to be measured on a GPU machine, as one command."""
