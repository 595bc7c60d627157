"""scripts/chat.py: talk to a trained model in the terminal.

source        where the parts of the model are: of a run, in a folder, on the hub
speaker       the loaded model, which streams its answers
conversation  what the model continues: a conversation, or one text after the other
terminal      reads what the user types, and prints the answers
"""
