"""Where the text of each corpus is found, one file per corpus. Needs nothing but NumPy, so a
prepared corpus loads on a machine without TFDS."""
