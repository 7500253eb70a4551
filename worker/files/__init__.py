"""Models on disk: where they are kept, and what is believed of their files."""
