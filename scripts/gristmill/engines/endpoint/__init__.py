"""A model that is served elsewhere: messages.py says what is asked and read, client.py how often, engine.py runs it."""
