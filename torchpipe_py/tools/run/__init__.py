"""``torchpipe run``: all files of a source through a configuration, with a line for each; it resumes."""
