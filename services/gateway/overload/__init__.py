"""What keeps the gateway from more work than it can do in time: who is served, shed or refused, what begins first, and how much the edge lets in."""
