"""The repository: its layout, its generated code, and what is installed from it."""
