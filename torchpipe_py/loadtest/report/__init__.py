"""A load test as tables, files, plots and a page."""
