"""scripts/chat.py: talk to a trained model in the terminal.

speaker       the loaded model, which streams its answers
conversation  what the model continues: a conversation, or one text after the other
terminal      reads what the user types, and prints the answers
"""
