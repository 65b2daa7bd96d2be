"""The console: the page at / and the small API behind it. What it shows is what the doors answer and the metrics say."""
