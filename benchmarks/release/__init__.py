"""Time until a worse release is rolled back, the rate of false rollbacks, and lost requests meanwhile."""
