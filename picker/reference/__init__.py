"""What the reference picker's users bring: EndpointPickerConfig files of both API groups.

A file is read strictly (`schema.py`), its plugins are known by their types (`plugins.py` and
others named there), and what it says is put in the terms of warmpath.yaml (`translate.py`). What
has no equivalent is refused by name; what is harmless to ignore is a warning.
"""
