"""The services of the API, one module each: messages to calls of what does the work, and back."""
