"""Code that several configs share."""
