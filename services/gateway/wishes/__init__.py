"""Reading wishes and searching titles off the event loop, and their part in the ranking."""
