"""The generated sections and the pictures of the documents.

sections  scripts/generate_docs.py
pictures  scripts/draw_pictures.py
"""
