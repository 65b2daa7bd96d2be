"""The console: the page at / and the JSON API behind it. It shows what the doors answer and what the metrics count."""
