"""What ``make_examples.py`` is made of: the drawings, the networks, and how good they are."""
