"""The tasks of the lab, each in a folder: page.md, files/ (where a student starts), check.py."""
