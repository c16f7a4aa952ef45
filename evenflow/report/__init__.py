"""The report's page, figures and tables, the timeline, and the drawings of the documents."""
