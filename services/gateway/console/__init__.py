"""The console: the page at / and its JSON API. It shows the doors' answers and the metrics."""
