"""Files are written whole, whatever text is in them."""

import json
import os

from txl_jax.files import write_json


def test_json_keeps_names_and_prompts_that_are_not_utf8(tmp_path):
    """They come from the command line as surrogates; other text is written as it is."""
    path = str(tmp_path / "config.json")
    for value in ({"prompt": "é€"}, {"prompt": "é", "path": os.fsdecode(b"caf\xe9")}):
        write_json(path, value)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        assert json.loads(text) == value
        assert text.isascii() == ("path" in value)
